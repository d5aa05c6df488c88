// Streams, events and memory of the devices, as torch asks for them.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

#include "capture.h"

namespace fake {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(c10::DeviceIndex index) { return {KIND, index}; }
  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return device(current); }
  void setDevice(c10::Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) current = to.index();
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = device(current);
    uncheckedSetDevice(to);
    return before;
  }
  static c10::Device with_index(c10::Device of) { return of.has_index() ? of : device(current); }
  c10::Stream getStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(of), streams[with_index(of).index()]);
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(of));
  }
  c10::Stream getNewStream(c10::Device of, int = 0) const override {
    Locked lock(checker().lock);
    return c10::Stream(c10::Stream::UNSAFE, with_index(of), checker().add(with_index(of).index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked lock(checker().lock);
    synchronize(agent_of(stream), "synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Locked lock(checker().lock);
    for (Agent stream = 1; stream < checker().count(); ++stream)
      if (checker().device(stream) == index) synchronize(stream, "synchronize");
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock(checker().lock);
    if (!*event) *event = new Event;
    record_event(agent_of(stream), *static_cast<Event*>(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked lock(checker().lock);
    if (event) wait_event(agent_of(stream), *static_cast<Event*>(event));
  }
  // The event of a handle, for the host to ask.
  static Event& event_of(void* handle, const char* name) {
    refuse_wait(name);
    auto& event = *static_cast<Event*>(handle);
    TORCH_CHECK(!event.capture, "fake: `", name, "` of an event that was recorded in a capture; record it outside.");
    return event;
  }
  bool queryEvent(void* handle) const override {  // asked again, it has happened meanwhile
    Locked lock(checker().lock);
    if (!handle) return true;
    auto& event = event_of(handle, "event.query");
    bool has_passed = std::exchange(event.asked, true) || checker().passed(event);
    if (has_passed) synchronizeEvent(handle);
    return has_passed;
  }
  void synchronizeEvent(void* handle) const override {
    Locked lock(checker().lock);
    if (!handle) return;
    auto& event = event_of(handle, "event.synchronize");
    checker().synchronize(event);
    now.reach(event.time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    Locked lock(checker().lock);
    auto &first = event_of(start, "event.elapsed_time"), &last = event_of(end, "event.elapsed_time");
    TORCH_CHECK(checker().passed(first) && checker().passed(last), "fake: an event has not happened yet");
    return (last.time - first.time) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked lock(checker().lock);
    checker().record_stream(reinterpret_cast<uintptr_t>(data.get()), agent_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory: of the device that is current, for the stream that is; or of the host, pinned. What is allocated while that
// stream is captured is of the graph's pool, pinned memory too: torch's allocator of it has pools (HostPrivatePool).
inline void* allocate_memory(size_t bytes, Agent owner) {
  Locked lock(checker().lock);
  auto* capture = capture_of(agent_on(current));
  // A pool has sizes in steps, so that tensors of nearby sizes are handed the same memory, as on CUDA.
  bytes = capture ? (bytes + 511) / 512 * 512 : bytes;
  bytes = std::max<size_t>(bytes, 1);
  if (auto low = capture ? checker().take_unused(capture->pool, bytes, owner) : 0) return reinterpret_cast<void*>(low);
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "out of memory");
  checker().allocated(reinterpret_cast<uintptr_t>(memory), bytes, owner, capture ? capture->pool : 0);
  return memory;
}
inline void release_memory(void* memory) {
  Locked lock(checker().lock);
  if (checker().release(reinterpret_cast<uintptr_t>(memory))) free(memory);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_memory(bytes, agent_on(current));
    return {memory, memory, &release_memory, Guard::device(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
inline Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_memory(bytes, HOST);
    return {memory, memory, &release_memory, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline Pinned pinned;
REGISTER_HOST_ALLOCATOR(KIND, &pinned)

}  // namespace fake
