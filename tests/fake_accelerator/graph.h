// A graph of captured work, and its replay.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include "ops.h"

namespace fake {

class Graph {
 public:
  ~Graph() { reset(); }

  void register_state(DrawStatePointer state) { states.insert(state); }

  void capture_begin(c10::DeviceIndex device, DrawStatePointer default_state, int64_t pool, const std::string& mode) {
    Locked lock(checker().lock);
    auto stream = agent_on(device);
    TORCH_CHECK(!capture && nodes.empty(), "fake: this graph is captured already; call reset first.");
    bool is_default = checker().shared.count(stream);
    TORCH_CHECK(!is_default, "fake: a graph cannot be captured on the default stream; use another.");
    TORCH_CHECK(!capture_of(stream), "fake: this stream is captured by another graph.");
    bool has_mode = mode == "global" || mode == "thread_local" || mode == "relaxed";
    TORCH_CHECK(has_mode, "fake: there is no capture mode ", mode);
    register_state(default_state);
    static int64_t count = 0;
    auto outlives = std::string(failed_pools().count(pool) ? "a capture into this pool has failed" : "");
    if (!checker().pools.count(pool) && checker().has_tensors(pool)) outlives = "a tensor of this pool outlives its graphs";
    TORCH_CHECK(outlives.empty(), "fake: ", outlives, "; capture into another pool.");
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
    Locked lock(checker().lock);
    TORCH_CHECK(capture, "fake: capture_end is called without capture_begin.");
    if (capture->error.empty() && agent_on(device) != capture->origin)
      capture->error = "a capture ends on the stream on which it began.";
    if (capture->error.empty() && capture->has_unjoined_branch())
      capture->error = "a stream joined the capture, and the first stream does not wait for its last event.";
    auto error = capture->error;
    finish_capture();
    if (!error.empty()) {
      failed_pools().insert(pool);
      nodes.clear();
      reset();
      TORCH_CHECK(false, "fake: the capture is invalid: ", error);
    }
  }
  void replay() {
    std::unique_lock lock(checker().lock);
    TORCH_CHECK(!capture && pool, "fake: this graph has nothing to replay; capture it first.");
    auto stream = agent_on(device);
    if (auto* capture = capture_for_work(stream, "replay"))
      refuse(capture, "a graph cannot be replayed within a capture.");
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
    c10::DispatchKeySet modes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    c10::impl::ExcludeDispatchKeyGuard without_modes(modes | c10::autocast_dispatch_keyset);
    std::vector<Event> recorded(event_count);
    checker().queue(stream, 0, now);
    Event start, end;
    checker().record(stream, start);
    for (auto agent : agents) checker().wait(agent, start);
    for (const auto& node : nodes) {
      if (node.recorded >= 0) checker().record(node.agent, recorded[node.recorded]);
      if (node.awaited >= 0) checker().wait(node.agent, recorded[node.awaited]);
      if (!node.work.run) continue;
      checker().queue(node.agent, node.work.seconds, now);
      for (const auto& use : node.work.uses) checker().access(node.agent, use, node.work.name, replays);
      // Python may wait for another thread of it, which may use the device.
      if (node.work.calls_python) lock.unlock();
      node.work.run();
      if (node.work.calls_python) lock.lock();
    }
    for (auto agent : agents) {
      checker().record(agent, end);
      checker().wait(stream, end);
    }
    for (auto& [state, offset] : offsets) state->offset += offset;
  }
  void reset() {
    Locked lock(checker().lock);
    if (capture) finish_capture();
    // As CUDA: a finalizer has nobody to tell, so the capture ends with an error.
    for (auto* running : captures())
      if (!nodes.empty() && running->forbids_here() && running->error.empty())
        running->error = "a graph was deleted while another was captured; disable gc meanwhile.";
    // As torch: the workspace of the stream on which it was captured, whoever uses that now.
    if (!nodes.empty()) workspaces().erase(origin);
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
    auto& memory = checker().pools.at(pool);
    for (auto low : std::exchange(memory.unused_after_capture, {}))
      memory.unused.emplace(checker().of(low)->high - low, low);
    captures().erase(std::find(captures().begin(), captures().end(), capture.get()));
    for (const auto& [stream, branch] : capture->branches) agents.push_back(branch.agent);
    nodes = std::move(capture->nodes);
    offsets = std::move(capture->offsets);
    outside = std::move(capture->outside);
    origin = capture->origin;
    event_count = capture->events;
    capture.reset();
  }

  // Torch 2.11 goes on allocating into the pool of a capture that has failed.
  static std::set<int64_t>& failed_pools() {
    static std::set<int64_t> pools;
    return pools;
  }

  c10::DeviceIndex device = 0;
  Agent origin = 0;
  std::unique_ptr<Capture> capture;
  std::set<DrawStatePointer> states;
  std::map<DrawStatePointer, uint64_t> offsets;
  std::vector<Node> nodes;
  std::vector<Agent> agents;
  std::set<uintptr_t> outside;
  int64_t event_count = 0;
};

}  // namespace fake
