// Who has to have waited for whom: vector clocks, as compute sanitizers keep them.
//
//   stream 1   write a ── record(e)            e carries stream 1's clock;
//   stream 2              wait(e) ── read a    stream 2 knows now of the write: ordered. Without the wait: a report.
//
// An agent is the host, or a stream. Each counts what was queued on it, and its clock says up to which number it has
// waited for each of the others. Queueing something hands the host's clock to the stream; a host that waits takes the
// stream's. All threads of the host are one agent: that a queue of Python orders them is not seen here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

using Agent = int64_t;
constexpr Agent HOST = 0;

struct Clock {
  std::vector<uint64_t> seen;

  uint64_t of(Agent who) const { return size_t(who) < seen.size() ? seen[who] : 0; }
  uint64_t& at(Agent who) {
    if (size_t(who) >= seen.size()) seen.resize(who + 1, 0);
    return seen[who];
  }
  void merge(const Clock& other) {
    for (size_t who = 0; who < other.seen.size(); ++who) at(who) = std::max(of(who), other.seen[who]);
  }
};

struct Access {
  uintptr_t low, high;  // the bytes from the first to the last
  Agent who;
  uint64_t count;
  bool writes;
  std::string name;
};

struct Event {
  Clock clock;
  double time = 0;
  bool asked = false;  // whether it has happened
};

struct Block {  // memory of a device, or pinned memory of the host
  uintptr_t low, high;
  Agent owner;  // the stream on whose order the allocator relies when it hands the memory out again
  std::vector<Access> accesses;
  std::set<Agent> recorded;
};

class Checker {
 public:
  std::recursive_mutex lock;
  std::set<std::string> reports;

  std::set<Agent> shared;  // default streams, on which any thread may be handed what is free, at once

  Agent add(int device) {
    agents.push_back({device, {}, 0});
    return agents.size() - 1;
  }

  // Something is queued on a stream, and takes so many seconds there; the host, `now` on its own time, goes on.
  void queue(Agent who, double seconds, double now) {
    auto& own = agents[who];
    own.clock.merge(agents[HOST].clock);
    ++own.clock.at(who);
    own.time = std::max(own.time, now) + seconds;
  }
  void record(Agent who, Event& event) { event = {agents[who].clock, agents[who].time}; }
  void wait(Agent who, const Event& event) {
    agents[who].clock.merge(event.clock);
    agents[who].time = std::max(agents[who].time, event.time);
  }
  // The host has waited for it.
  bool passed(const Event& event) const {
    for (size_t who = 1; who < event.clock.seen.size(); ++who)
      if (agents[HOST].clock.of(who) < event.clock.seen[who]) return false;
    return true;
  }
  double time(Agent who) const { return agents[who].time; }
  int device(Agent who) const { return agents[who].device; }
  std::string name(Agent who) const {
    return who == HOST ? "the host" : "fake:" + std::to_string(device(who)) + " stream " + std::to_string(who);
  }

  void allocated(uintptr_t low, size_t bytes, Agent owner) {
    reuse(owner);
    blocks[low] = {low, low + bytes, owner, {}, {}};
  }
  void release(uintptr_t low) {
    auto found = blocks.find(low);
    if (found == blocks.end()) return;
    auto& block = found->second;
    Clock waited;  // an event on each stream that was recorded: the allocator waits for these
    for (Agent who : block.recorded) waited.merge(agents[who].clock);
    for (const auto& one : block.accesses)
      if (one.who != block.owner && one.who != HOST && block.owner != HOST && waited.of(one.who) < one.count)
        freed[block.owner].push_back(one);
    if (shared.count(block.owner)) reuse(block.owner);
    blocks.erase(found);
  }
  void record_stream(uintptr_t low, Agent who) {
    if (auto* block = of(low)) block->recorded.insert(who);
  }
  Block* of(uintptr_t at) {
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return nullptr;
    auto& block = std::prev(after)->second;
    return at < block.high ? &block : nullptr;
  }

  void access(Agent who, uintptr_t low, uintptr_t high, bool writes, const std::string& op) {
    auto* block = of(low);
    if (!block || low == high) return;
    auto& clock = agents[who].clock;
    if (who == HOST) ++clock.at(HOST);
    auto& all = block->accesses;
    for (const auto& one : all)
      if (one.low < high && low < one.high && (writes || one.writes) && clock.of(one.who) < one.count)
        reports.insert(std::string("order: `") + op + "` on " + name(who) + (writes ? " writes" : " reads") + " what `" +
                       one.name + "` on " + name(one.who) + (one.writes ? " writes" : " reads") +
                       ", and has not waited for it");
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& one) {
      bool within = low <= one.low && one.high <= high;
      return within && (one.who == who ? writes || !one.writes : writes && clock.of(one.who) >= one.count);
    }), all.end());
    all.push_back({low, high, who, clock.of(who), writes, op});
  }

  // What was before is forgotten: reports, times, and who was where in memory. The host has waited for all.
  void reset() {
    for (auto& [low, block] : blocks) block.accesses.clear();
    for (auto& own : agents) {
      agents[HOST].clock.merge(own.clock);
      own.time = 0;
    }
    freed.clear();
    reports.clear();
  }
  // The host waits for a stream, or for an event.
  void synchronize(Agent who) { agents[HOST].clock.merge(agents[who].clock); }
  void synchronize(const Event& event) { agents[HOST].clock.merge(event.clock); }
  Agent count() const { return agents.size(); }

 private:
  // The allocator hands out what was freed: behind all that is queued on its stream, and all that the host has seen.
  void reuse(Agent owner) {
    Clock known = agents[owner].clock;
    known.merge(agents[HOST].clock);
    for (const auto& gone : freed[owner])
      if (known.of(gone.who) < gone.count)
        reports.insert("reuse: memory of " + name(owner) + " is handed out again, and `" + gone.name + "` on " +
                       name(gone.who) + " may still " + (gone.writes ? "write" : "read") + " it");
    freed[owner].clear();
  }

  struct Known {
    int device;
    Clock clock;
    double time;
  };
  std::vector<Known> agents;
  std::map<uintptr_t, Block> blocks;
  std::map<Agent, std::vector<Access>> freed;
};

}  // namespace fake
