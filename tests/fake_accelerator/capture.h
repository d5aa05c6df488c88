// Capture and replay, with the rules of CUDA graphs.
//
//   capture_begin   a.record(e)  b.wait(e)  b: y = x + 1  b.record(f)  a.wait(f)   capture_end       replay, replay, ..
//                   `b` joins the capture: its ops are those of the graph          `b` has joined back
//
// A captured op is a Node: what it uses, and a function that runs it. It also runs at once, as the next op may need its
// shapes; at the end of the capture, memory that was there before is restored, and that of the graph is poisoned. A
// replay runs the nodes in order. To the checker each captured stream is an agent, which waits for the stream of the
// replay, as that does for it at the end: so ops of a graph that nothing orders are reported by their replay.
#pragma once

#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "device.h"

namespace fake {

// What is queued on a stream at once.
struct Work {
  std::string name;
  double seconds;
  std::vector<Use> uses;
  std::function<void()> run;
  bool calls_python = false;
};

// A step of a graph: work, or an event that is recorded or waited for, by its index.
struct Node {
  Agent agent;
  Work work;
  int64_t recorded = -1, awaited = -1;
};

// The state of generators that draw by seed and offset alone, as Philox: a graph draws by both as they are at its
// replay. `graphsafe_set_state` makes generators share one, for ops that draw from the default generator alone.
struct DrawState {
  uint64_t seed = c10::default_rng_seed_val, offset = 0;
};
using DrawStatePointer = std::shared_ptr<DrawState>;

struct Capture {
  struct Branch {  // a captured stream
    Agent agent;
    Clock clock;  // which nodes of which branches come before
  };
  int64_t number, pool;
  std::string mode;
  Agent origin;
  std::thread::id thread = std::this_thread::get_id();
  uint64_t first_tenancy;
  std::map<Agent, Branch> branches;  // by stream
  std::map<DrawStatePointer, uint64_t> offsets;
  std::map<uintptr_t, std::vector<char>> saved;
  std::set<uintptr_t> outside;  // the addresses of memory of others
  std::vector<Node> nodes;
  int64_t events = 0;
  std::string error;

  bool forbids_here() const { return mode == "global" || std::this_thread::get_id() == thread; }
  bool owns(const Block& block) const { return block.pool == pool && block.tenancy > first_tenancy; }

  Branch& join(Agent stream) {
    auto agent = checker().add(checker().device(stream), "graph");
    auto& branch = branches[stream] = {agent, {}};
    branch.clock.at(agent) = 1;
    return branch;
  }
  void add(Agent stream, Work work) {
    auto& branch = branches.at(stream);
    ++branch.clock.at(branch.agent);
    for (auto& use : work.uses)
      if (auto* block = checker().of(use.low)) {
        use.tenancy = block->tenancy;
        if (block->pool != pool && outside.insert(block->low).second) checker().keep_address(block->low);
      }
    nodes.push_back({branch.agent, std::move(work)});
  }
  void record(Agent stream, Event& event) {
    auto& branch = branches.at(stream);
    event = {branch.clock, 0, false, number, events++};
    nodes.push_back({branch.agent, {}, event.index});
  }
  void wait(Agent stream, const Event& event) {
    auto& branch = branches.count(stream) ? branches[stream] : join(stream);
    branch.clock.merge(event.clock);
    nodes.push_back({branch.agent, {}, -1, event.index});
  }
  // Keep what an op is about to write over, unless it is memory of this graph.
  void save(const Use& use) {
    auto* block = checker().of(use.low);
    if (!use.writes || !block || owns(*block) || saved.count(block->low)) return;
    auto* bytes = reinterpret_cast<const char*>(block->low);
    saved[block->low] = {bytes, bytes + (block->high - block->low)};
  }
  bool has_unjoined_branch() const {
    for (const auto& [stream, branch] : branches)
      if (branches.at(origin).clock.of(branch.agent) < branch.clock.of(branch.agent)) return true;
    return false;
  }
  void restore_memory() {
    for (const auto& [low, bytes] : saved)
      if (auto* block = checker().of(low); block && block->low == low)
        std::memcpy(reinterpret_cast<void*>(low), bytes.data(), std::min(bytes.size(), size_t(block->high - low)));
    checker().visit_pool(pool, [&](Block& block) {
      if (!owns(block) || block.owner == HOST) return;
      std::memset(reinterpret_cast<void*>(block.low), 0xff, block.high - block.low);
      block.last_writer = block.last_replay = 0;
    });
  }
};

inline std::vector<Capture*>& captures() {
  static std::vector<Capture*> active;
  return active;
}
inline Capture* capture_of(Agent stream) {
  for (auto* capture : captures())
    if (capture->branches.count(stream)) return capture;
  return nullptr;
}
[[noreturn]] inline void refuse(Capture* capture, const std::string& sentence) {
  if (capture && capture->error.empty()) capture->error = sentence;
  TORCH_CHECK(false, "fake: ", sentence);
}
// Refuse what makes the host wait while a graph is captured: by mode, in this thread or in all.
inline void refuse_wait(const std::string& name) {
  for (auto* capture : captures())
    if (capture->forbids_here())
      refuse(capture, "`" + name + "` makes the host wait, which no graph can capture; wait before capture_begin.");
}
inline void synchronize(Agent stream, const std::string& name) {
  refuse_wait(name);
  checker().synchronize(stream);
  now.reach(checker().time(stream));
}
// The capture of the stream on which work is queued, or none; other streams have no work meanwhile.
inline Capture* capture_for_work(Agent stream, const std::string& name) {
  if (auto* capture = capture_of(stream)) return capture;
  for (auto* capture : captures())
    if (capture->forbids_here())
      refuse(capture, "`" + name + "` runs on " + checker().name(stream) +
                          ", which is not in the capture; let it wait for an event of a captured stream.");
  return nullptr;
}

inline void record_event(Agent stream, Event& event) {
  auto* capture = capture_of(stream);
  capture ? capture->record(stream, event) : checker().record(stream, event);
}
inline void wait_event(Agent stream, const Event& event) {
  auto *waiting = capture_of(stream), *recorded = static_cast<Capture*>(nullptr);
  for (auto* capture : captures())
    if (capture->number == event.capture) recorded = capture;
  if (!event.capture && !waiting) return checker().wait(stream, event);
  if (!event.capture) refuse(waiting, "a captured stream waits for an event from outside; record it in the capture.");
  if (!recorded) refuse(waiting, "a stream waits for an event of a capture that has ended; record it again.");
  if (waiting && waiting != recorded) refuse(waiting, "a captured stream waits for an event of another capture.");
  if (checker().shared.count(stream)) refuse(recorded, "the default stream cannot join a capture; use another stream.");
  recorded->wait(stream, event);
}
inline void make_wait(Agent stream, Agent awaited_stream) {
  Event event;
  record_event(awaited_stream, event);
  wait_event(stream, event);
}
// Queue work on a stream; on a captured one, add it to the graph.
inline void queue(Agent stream, Work work) {
  if (auto* capture = capture_for_work(stream, work.name)) return capture->add(stream, std::move(work));
  checker().queue(stream, work.seconds, now);
  for (const auto& use : work.uses) checker().access(stream, use, work.name);
}
}  // namespace fake
