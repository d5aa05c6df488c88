// Capture and replay, with the rules of CUDA graphs.
//
//   capture_begin   a.record(e)  b.wait(e)  b: y = x + 1  b.record(f)  a.wait(f)   capture_end       replay, replay, ..
//                   `b` joins the capture: its ops are those of the graph          `b` has joined back
//
// A captured op is a Node: what it uses, and a function that runs it. It also runs at once, as the next op may need its
// shapes; at the end of the capture, memory that was there before is restored, and that of the graph is poisoned. A
// replay runs the nodes in order. To the checker each captured stream is an agent of its own, which waits for the stream
// of the replay, as that does for it at the end: so ops of a graph that nothing orders are reported by their replay.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "happens_before.h"

namespace fake {

constexpr c10::DeviceIndex DEVICES = 4;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

Checker& checker();
using Locked = std::lock_guard<std::recursive_mutex>;
// Streams: 0 is the default one of its device, and each other has the number of its agent.
extern thread_local std::array<c10::StreamId, DEVICES> streams;
inline Agent agent_on(c10::DeviceIndex device) { return streams[device] ? streams[device] : 1 + device; }
double host_time();

// What is queued on a stream at once.
struct Work {
  std::string name;
  double seconds;
  std::vector<Use> uses;
  std::function<void()> run;
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

struct FakeGenerator final : c10::GeneratorImpl {
  static constexpr uint64_t OFFSET_OF_AN_OP = 4;
  DrawStatePointer state = std::make_shared<DrawState>();

  explicit FakeGenerator(c10::DeviceIndex index)
      : GeneratorImpl({KIND, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return state->offset; }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& bytes) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& generator) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  FakeGenerator* clone_impl() const override;
};
// The generator of the CPU from which one op draws.
at::Generator generator_at(uint64_t seed, uint64_t offset);

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
  if (!event.capture) refuse(waiting, "a captured stream waits for an event from outside the capture; record it within.");
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
  checker().queue(stream, work.seconds, host_time());
  for (const auto& use : work.uses) checker().access(stream, use, work.name);
}
// A function that gives the generator from which an op on a stream draws, at each run of the op.
inline std::function<at::Generator()> draw(DrawStatePointer state, Agent stream, const std::string& name) {
  auto* capture = capture_for_work(stream, name);
  if (!capture)
    return [seed = state->seed, offset = std::exchange(state->offset, state->offset + FakeGenerator::OFFSET_OF_AN_OP)] {
      return generator_at(seed, offset);
    };
  auto entry = capture->offsets.find(state);
  if (entry == capture->offsets.end())
    refuse(capture, "`" + name + "` draws from a generator that is not registered; call register_generator_state.");
  auto offset = std::exchange(entry->second, entry->second + FakeGenerator::OFFSET_OF_AN_OP);
  return [state, offset] { return generator_at(state->seed, state->offset + offset); };
}

class Graph {
 public:
  ~Graph() { reset(); }

  void register_state(DrawStatePointer state) { states.insert(state); }

  void capture_begin(c10::DeviceIndex device, DrawStatePointer default_state, int64_t pool, const std::string& mode) {
    Locked held(checker().lock);
    auto stream = agent_on(device);
    TORCH_CHECK(!capture && nodes.empty(), "fake: this graph is captured already; call reset first.");
    TORCH_CHECK(!checker().shared.count(stream), "fake: a graph cannot be captured on the default stream; use another.");
    TORCH_CHECK(!capture_of(stream), "fake: this stream is captured by another graph.");
    register_state(default_state);
    static int64_t count = 0;
    this->device = device;
    this->pool = pool;
    ++checker().pools[pool].graphs;
    capture = std::make_unique<Capture>(Capture{++count, pool, mode, stream});
    capture->first_tenancy = checker().tenancies;
    for (auto& state : states) capture->offsets[state] = 0;
    capture->join(stream);
    captures().push_back(capture.get());
  }
  void capture_end() {
    Locked held(checker().lock);
    TORCH_CHECK(capture, "fake: capture_end is called without capture_begin.");
    if (capture->error.empty() && agent_on(device) != capture->origin)
      capture->error = "a capture ends on the stream on which it began.";
    if (capture->error.empty() && capture->has_unjoined_branch())
      capture->error = "a stream has joined the capture and not joined back; let the first stream wait for its last event.";
    auto error = capture->error;
    finish_capture();
    if (!error.empty()) {
      reset();
      TORCH_CHECK(false, "fake: the capture is invalid: ", error);
    }
  }
  void replay() {
    Locked held(checker().lock);
    TORCH_CHECK(!capture && pool, "fake: this graph has nothing to replay; capture it first.");
    auto stream = agent_on(device);
    if (auto* other = capture_for_work(stream, "replay")) refuse(other, "a graph cannot be replayed within a capture.");
    for (const auto& node : nodes)
      for (const auto& use : node.work.uses)
        if (use.tenancy && !checker().of(use.low)) {
          auto report = "freed: a replay " + std::string(use.writes ? "writes" : "reads") + ", by `" + node.work.name +
                        "`, memory that was freed after the capture; keep its tensor";
          checker().reports.insert(report);
          TORCH_CHECK(false, "fake: ", report);
        }
    static uint64_t replays = 0;
    ++replays;
    at::DisableRecordFunctionGuard unseen;
    at::AutoDispatchBelowAutograd plainly;
    c10::impl::ExcludeDispatchKeyGuard without_modes(
        c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    std::vector<Event> recorded(event_count);
    checker().queue(stream, 0, host_time());
    Event start, end;
    checker().record(stream, start);
    for (auto agent : agents) checker().wait(agent, start);
    for (const auto& node : nodes) {
      if (node.recorded >= 0) checker().record(node.agent, recorded[node.recorded]);
      if (node.awaited >= 0) checker().wait(node.agent, recorded[node.awaited]);
      if (!node.work.run) continue;
      checker().queue(node.agent, node.work.seconds, host_time());
      for (const auto& use : node.work.uses) checker().access(node.agent, use, node.work.name, replays);
      node.work.run();
    }
    for (auto agent : agents) {
      checker().record(agent, end);
      checker().wait(stream, end);
    }
    for (auto& [state, offset] : offsets) state->offset += offset;
  }
  void reset() {
    Locked held(checker().lock);
    if (capture) finish_capture();
    nodes.clear();
    agents.clear();
    offsets.clear();
    for (auto low : std::exchange(outside, {}))
      if (checker().release_address(low)) free(reinterpret_cast<void*>(low));
    auto used_pool = std::exchange(pool, 0);
    if (!used_pool) return;
    for (auto low : checker().release_pool(used_pool)) free(reinterpret_cast<void*>(low));
  }

  int64_t pool = 0;

 private:
  void finish_capture() {
    capture->restore_memory();
    auto& [graphs, unused, deferred] = checker().pools.at(pool);
    for (auto low : std::exchange(deferred, {})) unused.emplace(checker().of(low)->high - low, low);
    captures().erase(std::find(captures().begin(), captures().end(), capture.get()));
    for (const auto& [stream, branch] : capture->branches) agents.push_back(branch.agent);
    nodes = std::move(capture->nodes);
    offsets = std::move(capture->offsets);
    outside = std::move(capture->outside);
    event_count = capture->events;
    capture.reset();
  }

  c10::DeviceIndex device = 0;
  std::unique_ptr<Capture> capture;
  std::set<DrawStatePointer> states;
  std::map<DrawStatePointer, uint64_t> offsets;
  std::vector<Node> nodes;
  std::vector<Agent> agents;
  std::set<uintptr_t> outside;
  int64_t event_count = 0;
};

}  // namespace fake
