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
#include <utility>
#include <vector>

namespace fake {

using Agent = int64_t;
constexpr Agent HOST = 0;

struct Clock {
  std::vector<uint64_t> seen;

  uint64_t of(Agent agent) const { return size_t(agent) < seen.size() ? seen[agent] : 0; }
  uint64_t& at(Agent agent) {
    if (size_t(agent) >= seen.size()) seen.resize(agent + 1, 0);
    return seen[agent];
  }
  void merge(const Clock& clock) {
    for (size_t agent = 0; agent < clock.seen.size(); ++agent) at(agent) = std::max(of(agent), clock.seen[agent]);
  }
};

struct Access {
  uintptr_t low, high;  // the bytes from the first to the last
  Agent agent;
  uint64_t count;
  bool writes;
  std::string name;
};

struct Event {
  Clock clock;
  double time = 0;
  bool asked = false;   // whether it has happened
  int64_t capture = 0;  // the number of the capture it was recorded in, or 0
  int64_t index = 0;    // which event of that capture
};

struct Block {  // memory of a device, or pinned memory of the host
  uintptr_t low, high;
  Agent owner;  // the stream on whose order the allocator relies when it hands the memory out again
  std::vector<Access> accesses;
  std::set<Agent> recorded;
  int64_t pool = 0;            // the pool of graphs that keeps the memory, or 0
  uint64_t tenancy = 0;        // the number of the allocation that has it
  uint64_t last_writer = 0;    // the tenancy whose tensors were written last; 0 if nothing is there
  uint64_t last_replay = 0;    // the replay that wrote last, or 0
  bool was_read = false;       // since then
  bool lost_a_result = false;  // that replay wrote over the result of an earlier one, which nobody had read
};

// Memory that an op reads or writes.
struct Use {
  uintptr_t low, high;
  bool writes;
  uint64_t tenancy = 0;  // in a graph, the number of the allocation that had it at the capture
};

// Memory that graphs keep: what its tensors free goes to later captures, and to nobody else.
struct Pool {
  int graphs = 0;
  std::multimap<size_t, uintptr_t> unused;
  std::vector<uintptr_t> unused_after_capture;  // what other streams use: a capture has no events to wait for
  std::vector<uintptr_t> pinned;                // freed, but a copy of the graph may read it: CUDA keeps it too
};

class Checker {
 public:
  std::recursive_mutex lock;
  std::set<std::string> reports;

  std::set<Agent> shared;  // default streams, on which any thread may be handed what is free, at once

  Agent add(int device, const char* kind = "stream") {
    agents.push_back({device, {}, 0, kind});
    return agents.size() - 1;
  }

  // Something is queued on a stream, and takes so many seconds there; the host, `now` on its own time, goes on.
  void queue(Agent agent, double seconds, double now) {
    auto& stream = agents[agent];
    stream.clock.merge(agents[HOST].clock);
    ++stream.clock.at(agent);
    stream.time = std::max(stream.time, now) + seconds;
  }
  void record(Agent agent, Event& event) { event = {agents[agent].clock, agents[agent].time}; }
  void wait(Agent agent, const Event& event) {
    agents[agent].clock.merge(event.clock);
    agents[agent].time = std::max(agents[agent].time, event.time);
  }
  // The host has waited for it.
  bool passed(const Event& event) const {
    for (size_t agent = 1; agent < event.clock.seen.size(); ++agent)
      if (agents[HOST].clock.of(agent) < event.clock.seen[agent]) return false;
    return true;
  }
  double time(Agent agent) const { return agents[agent].time; }
  int device(Agent agent) const { return agents[agent].device; }
  std::string name(Agent agent) const {
    if (agent == HOST) return "the host";
    return "fake:" + std::to_string(device(agent)) + " " + agents[agent].kind + " " + std::to_string(agent);
  }

  std::map<int64_t, Pool> pools;
  uint64_t tenancies = 0;

  std::string describe(const std::string& op, Agent agent) const { return "`" + op + "` on " + name(agent); }

  void allocated(uintptr_t low, size_t bytes, Agent owner, int64_t pool = 0) {
    if (!pool) reuse(owner);
    blocks[low] = {low, low + bytes, owner, {}, {}, pool, ++tenancies};
  }
  // Hand out memory that a tensor of the pool has freed, to the same stream; 0 if there is none.
  uintptr_t take_unused(int64_t pool, size_t bytes, Agent owner) {
    auto& unused = pools[pool].unused;
    for (auto entry = unused.lower_bound(bytes); entry != unused.end(); ++entry) {
      auto& block = blocks.at(entry->second);
      if (block.owner != owner) continue;
      unused.erase(entry);
      block.recorded.clear();
      block.tenancy = ++tenancies;
      return block.low;
    }
    return 0;
  }
  // A tensor lets go of its memory. Returns whether it goes back to the system: a pool keeps its own.
  bool release(uintptr_t low) {
    auto entry = blocks.find(low);
    if (entry == blocks.end()) return true;
    auto& block = entry->second;
    if (auto pool = pools.find(block.pool); pool != pools.end()) {
      if (block.owner == HOST) pool->second.pinned.push_back(low);
      else if (!block.recorded.empty()) pool->second.unused_after_capture.push_back(low);
      else pool->second.unused.emplace(block.high - block.low, low);
      return false;
    }
    Clock waited;  // an event on each stream that was recorded: the allocator waits for these
    for (Agent agent : block.recorded) waited.merge(agents[agent].clock);
    // The memory of a pool that is gone went back to the system, which waits for the device.
    for (const auto& access : block.accesses)
      if (!block.pool && access.agent != block.owner && access.agent != HOST && block.owner != HOST &&
          waited.of(access.agent) < access.count)
        freed[block.owner].push_back(access);
    if (shared.count(block.owner)) reuse(block.owner);
    blocks.erase(entry);
    return !retain_if_used(low);
  }
  // While a graph lives, no tensor gets memory at an address that the graph reads or writes outside of its pool: what
  // was freed there would come back as other tensors, now and then.
  void keep_address(uintptr_t low) { ++graphs_by_address[low]; }
  bool retain_if_used(uintptr_t low) {
    if (!graphs_by_address.count(low)) return false;
    freed_addresses.insert(low);
    return true;
  }
  // Returns whether the memory there goes back to the system.
  bool release_address(uintptr_t low) {
    if (--graphs_by_address.at(low)) return false;
    graphs_by_address.erase(low);
    return freed_addresses.erase(low);
  }
  // A graph lets go of its pool. Returns the memory that goes back to the system with the last graph.
  std::vector<uintptr_t> release_pool(int64_t number) {
    auto& pool = pools.at(number);
    if (--pool.graphs) return {};
    auto lows = pool.pinned;
    lows.insert(lows.end(), pool.unused_after_capture.begin(), pool.unused_after_capture.end());
    for (auto [size, low] : pool.unused) lows.push_back(low);
    pools.erase(number);
    std::erase_if(lows, [&](uintptr_t low) {
      blocks.erase(low);
      return retain_if_used(low);
    });
    return lows;
  }
  bool has_tensors(int64_t pool) const {
    return std::any_of(blocks.begin(), blocks.end(), [&](const auto& entry) { return entry.second.pool == pool; });
  }
  // Call a function with each block of a pool.
  template <class Visit>
  void visit_pool(int64_t number, Visit visit) {
    for (auto& [low, block] : blocks)
      if (block.pool == number) visit(block);
  }
  void record_stream(uintptr_t low, Agent agent) {
    if (auto* block = of(low)) block->recorded.insert(agent);
  }
  Block* of(uintptr_t at) {
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return nullptr;
    auto& block = std::prev(after)->second;
    return at < block.high ? &block : nullptr;
  }

  void access(Agent agent, Use use, const std::string& op, uint64_t replay = 0) {
    auto [low, high, writes, tenancy] = use;
    auto* block = of(low);
    if (!block || low == high) return;
    auto& clock = agents[agent].clock;
    if (agent == HOST) ++clock.at(HOST);
    auto& accesses = block->accesses;
    for (const auto& before : accesses)
      if (before.low < high && low < before.high && (writes || before.writes) && clock.of(before.agent) < before.count)
        reports.insert("order: " + describe(op, agent) + (writes ? " writes" : " reads") + " what " +
                       describe(before.name, before.agent) + (before.writes ? " writes" : " reads") +
                       ", and has not waited for it");
    std::erase_if(accesses, [&](const Access& before) {
      bool within = low <= before.low && before.high <= high;
      if (before.agent == agent) return within && (writes || !before.writes);
      return within && writes && clock.of(before.agent) >= before.count;
    });
    accesses.push_back({low, high, agent, clock.of(agent), writes, op});
    if (block->pool) access_pool(*block, replay ? tenancy : block->tenancy, writes, op, agent, replay);
  }

  // What was before is forgotten: reports, times, and who was where in memory. The host has waited for all.
  void reset() {
    for (auto& [low, block] : blocks) {
      block.accesses.clear();
      block.last_replay = 0;
      block.lost_a_result = false;
    }
    for (auto& agent : agents) {
      agents[HOST].clock.merge(agent.clock);
      agent.time = 0;
    }
    freed.clear();
    reports.clear();
  }
  // The host waits for a stream, or for an event.
  void synchronize(Agent agent) { agents[HOST].clock.merge(agents[agent].clock); }
  void synchronize(const Event& event) { agents[HOST].clock.merge(event.clock); }
  Agent count() const { return agents.size(); }

 private:
  // What a graph leaves in its pool is there until a replay writes over it, which may be one of another graph.
  void access_pool(Block& block, uint64_t tenancy, bool writes, const std::string& op, Agent agent, uint64_t replay) {
    if (!writes) {
      std::string mistake;
      if (!block.last_writer) mistake = "memory of a graph that no replay has written";
      else if (block.last_writer != tenancy) mistake = "memory of a graph that a replay has since used for other tensors";
      else if (!replay && block.lost_a_result) mistake = "a result of a graph that a later replay overwrote; clone it";
      if (!mistake.empty()) reports.insert("pool: " + describe(op, agent) + " reads " + mistake);
      // A graph that reads what it has itself just written does not keep it for the caller.
      if (replay != block.last_replay || !replay) block.was_read = true;
      return;
    }
    bool is_same_tensor = std::exchange(block.last_writer, tenancy) == tenancy;
    if (is_same_tensor && replay && replay == block.last_replay) return;
    block.lost_a_result = is_same_tensor && replay && block.last_replay && !block.was_read;
    block.last_replay = replay;
    block.was_read = false;
  }

  // The allocator hands out what was freed: behind all that is queued on its stream, and all that the host has seen.
  void reuse(Agent owner) {
    Clock clock = agents[owner].clock;
    clock.merge(agents[HOST].clock);
    for (const auto& access : freed[owner])
      if (clock.of(access.agent) < access.count)
        reports.insert("reuse: memory of " + name(owner) + " is handed out again, and " +
                       describe(access.name, access.agent) + " may still " + (access.writes ? "write" : "read") + " it");
    freed[owner].clear();
  }

  struct AgentState {
    int device;
    Clock clock;
    double time;
    std::string kind;  // a stream, or the part of a graph that was captured on a stream
  };
  std::vector<AgentState> agents;
  std::map<uintptr_t, Block> blocks;
  std::map<Agent, std::vector<Access>> freed;
  std::map<uintptr_t, int> graphs_by_address;
  std::set<uintptr_t> freed_addresses;
};

}  // namespace fake
