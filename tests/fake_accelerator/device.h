// The devices as a thread of the host sees them: their checker, its current device and streams, and its time.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>

#include "happens_before.h"

namespace fake {

constexpr c10::DeviceIndex DEVICES = 4;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

inline Checker& checker() {
  static Checker* checker = [] {
    auto* checker = new Checker;
    checker->add(-1);  // the host
    for (int n = 0; n < DEVICES; ++n) checker->shared.insert(checker->add(n));  // and the default stream of each device
    return checker;
  }();
  return *checker;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// Streams: 0 is the default one of its device, and each other has the number of its agent.
inline thread_local c10::DeviceIndex current = 0;
inline thread_local std::array<c10::StreamId, DEVICES> streams{};
inline Agent agent_of(c10::Stream stream) { return stream.id() ? stream.id() : 1 + stream.device_index(); }
inline Agent agent_on(c10::DeviceIndex device) { return streams[device] ? streams[device] : 1 + device; }

// This thread of the host, on the time of the streams; 0 once all is reset.
inline std::atomic<int> resets{0};
struct HostTime {
  double time = 0;
  int reset = 0;
  operator double() {
    if (std::exchange(reset, resets) != resets) time = 0;
    return time;
  }
  void reach(double event_time) { time = std::max(double(*this), event_time); }
};
inline thread_local HostTime now;

}  // namespace fake
