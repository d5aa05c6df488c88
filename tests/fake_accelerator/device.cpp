// An accelerator that is none, by which programs for accelerators are checked where there is no GPU.
//
//   fake:0, fake:1, ..     devices with memory, streams, events, pinned host memory and asynchronous copies, as CUDA has
//
// An op computes at once, on the CPU, in memory of the host: so the bits are always right. Whether they would be on a
// device, where only streams and events order what runs, is what happens_before.h finds out: here each op, copy,
// allocation and wait tells it which memory it reads and writes, and on which stream. Where CUDA waits by itself (a
// copy that blocks, one between devices, `item()`), so does this. Time is that of the streams: an op takes as long as
// it has elements, and starts once its stream, and what that waits for, is there.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

#include "happens_before.h"

namespace fake {

constexpr c10::DeviceIndex DEVICES = 4;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr double SECONDS_PER_BYTE = 1e-6;

Checker& checker() {
  static Checker* one = [] {
    auto* made = new Checker;
    made->add(-1);  // the host
    for (int n = 0; n < DEVICES; ++n) made->shared.insert(made->add(n));  // and the default stream of each device
    return made;
  }();
  return *one;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// Streams: 0 is the default one of its device, and each other has the number of its agent.
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, DEVICES> streams{};
// This thread of the host, on the time of the streams; 0 once all is reset.
std::atomic<int> resets{0};
struct Now {
  double time = 0;
  int of = 0;
  operator double() {
    if (std::exchange(of, resets) != resets) time = 0;
    return time;
  }
  void reach(double other) { time = std::max(double(*this), other); }
};
thread_local Now now;

Agent agent(c10::Stream one) { return one.id() ? one.id() : 1 + one.device_index(); }
Agent agent_on(c10::DeviceIndex device) { return streams[device] ? streams[device] : 1 + device; }
void synchronize(Agent who) {
  checker().synchronize(who);
  now.reach(checker().time(who));
}

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
  static c10::Device known(c10::Device on) { return on.has_index() ? on : device(current); }
  c10::Stream getStream(c10::Device on) const override {
    return c10::Stream(c10::Stream::UNSAFE, known(on), streams[known(on).index()]);
  }
  c10::Stream getDefaultStream(c10::Device on) const override { return c10::Stream(c10::Stream::DEFAULT, known(on)); }
  c10::Stream getNewStream(c10::Device on, int = 0) const override {
    Locked held(checker().lock);
    return c10::Stream(c10::Stream::UNSAFE, known(on), checker().add(known(on).index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override { return getNewStream(on); }
  c10::Stream exchangeStream(c10::Stream one) const override {
    auto before = getStream(one.device());
    streams[one.device_index()] = one.id();
    return before;
  }
  bool queryStream(const c10::Stream& one) const override {
    synchronizeStream(one);
    return true;
  }
  void synchronizeStream(const c10::Stream& one) const override {
    Locked held(checker().lock);
    synchronize(agent(one));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Locked held(checker().lock);
    for (Agent who = 1; who < checker().count(); ++who)
      if (checker().device(who) == index) synchronize(who);
  }
  void record(void** event, const c10::Stream& one, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked held(checker().lock);
    if (!*event) *event = new Event;
    checker().record(agent(one), *static_cast<Event*>(*event));
  }
  void block(void* event, const c10::Stream& one) const override {
    Locked held(checker().lock);
    if (event) checker().wait(agent(one), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {  // asked again, it has happened meanwhile
    Locked held(checker().lock);
    if (!event) return true;
    auto& asked = *static_cast<Event*>(event);
    bool before = std::exchange(asked.asked, true) || checker().passed(asked);
    if (before) synchronizeEvent(event);
    return before;
  }
  void synchronizeEvent(void* event) const override {
    Locked held(checker().lock);
    if (!event) return;
    checker().synchronize(*static_cast<Event*>(event));
    now.reach(static_cast<Event*>(event)->time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* one, void* other, const c10::DeviceIndex) const override {
    Locked held(checker().lock);
    auto &first = *static_cast<Event*>(one), &last = *static_cast<Event*>(other);
    TORCH_CHECK(checker().passed(first) && checker().passed(last), "fake: an event has not happened yet");
    return (last.time - first.time) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& one) const override {
    Locked held(checker().lock);
    checker().record_stream(reinterpret_cast<uintptr_t>(data.get()), agent(one));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory: of the device that is current, for the stream that is; or of the host, pinned.
void* taken(size_t bytes, Agent owner) {
  void* made = nullptr;
  TORCH_CHECK(posix_memalign(&made, 64, std::max<size_t>(bytes, 1)) == 0, "out of memory");
  Locked held(checker().lock);
  checker().allocated(reinterpret_cast<uintptr_t>(made), std::max<size_t>(bytes, 1), owner);
  return made;
}
void given_back(void* made) {
  {
    Locked held(checker().lock);
    checker().release(reinterpret_cast<uintptr_t>(made));
  }
  free(made);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* made = taken(bytes, agent_on(current));
    return {made, made, &given_back, Guard::device(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &given_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* made = taken(bytes, HOST);
    return {made, made, &given_back, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &given_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
Pinned pinned;
REGISTER_HOST_ALLOCATOR(KIND, &pinned)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex to) const override { current = to; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return std::exchange(current, to); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? current : std::exchange(current, to);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* at) const override {
    Locked held(checker().lock);
    auto* block = checker().of(reinterpret_cast<uintptr_t>(at));
    return block && block->owner == HOST;
  }
};

// Ops.
struct Extent {
  uintptr_t low, high;
};
Extent extent(const at::Tensor& one) {
  auto low = reinterpret_cast<uintptr_t>(one.const_data_ptr());
  if (!one.numel()) return {low, low};
  int64_t last = 0;
  for (int64_t dim = 0; dim < one.dim(); ++dim) last += (one.size(dim) - 1) * one.stride(dim);
  return {low, low + (last + 1) * one.element_size()};
}
void touch(Agent who, const at::Tensor& one, bool writes, const std::string& name) {
  auto [low, high] = extent(one);
  checker().access(who, low, high, writes, name);
}
double seconds(const at::Tensor& one) { return one.nbytes() * SECONDS_PER_BYTE; }
at::Tensor on_host(const at::Tensor& one) {
  return at::from_blob(const_cast<void*>(one.const_data_ptr()), one.sizes(), one.strides(),
                       one.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A copy on the stream where CUDA has it: that of the device, or between two that of the source, and each of the two
// current streams waits for the other.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::DisableRecordFunctionGuard unseen;
  bool out = from.is_cpu(), back = to.is_cpu();
  {
    Locked held(checker().lock);
    auto device = out ? to.device().index() : from.device().index();
    auto who = agent_on(device), other = back ? who : agent_on(to.device().index());
    std::string name = out ? "copy to the device" : back ? "copy to the host" : who == other ? "copy" : "copy between devices";
    Event ready, done;
    checker().record(other, ready);
    if (who != other) checker().wait(who, ready);
    checker().queue(who, seconds(to), now);
    touch(who, from, false, name);
    touch(who, to, true, name);
    checker().record(who, done);
    if (who != other) checker().wait(other, done);
    bool pageable = (out && !from.is_pinned()) || (back && !to.is_pinned());
    if ((out || back) && (!non_blocking || (back && pageable))) synchronize(who);
    if (pageable) now.reach(done.time);
  }
  (back ? to : on_host(to)).copy_(out ? from : on_host(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& one) {
  at::DisableRecordFunctionGuard unseen;
  {
    Locked held(checker().lock);
    auto who = agent_on(one.device().index());
    checker().queue(who, seconds(one), now);
    touch(who, one, false, "item");
    synchronize(who);
  }
  return on_host(one).item();
}
void record_stream(at::Tensor& one, c10::Stream stream) {
  Guard().recordDataPtrOnStream(one.storage().data_ptr(), stream);
}

struct Argument {
  at::Tensor own, host;
  bool writes;
};

// Any other op: on the host's view of its tensors, and what comes out in memory of the device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::DisableRecordFunctionGuard unseen;
  const auto& schema = op.schema();
  auto name = schema.name().substr(schema.name().find("::") + 2);
  auto count = schema.arguments().size(), base = stack->size() - count;
  std::vector<Argument> all;
  std::optional<c10::Device> device;
  auto host_of = [&](const at::Tensor& one, bool writes) {
    if (!one.defined()) return one;
    if (one.is_cpu()) {
      TORCH_CHECK(one.dim() == 0, "fake: `", name, "` is handed a tensor of a device, and one of the CPU");
      return one;
    }
    if (device && one.device() != *device) {
      Locked held(checker().lock);
      checker().reports.insert("devices: `" + name + "` is handed tensors of two devices");
      TORCH_CHECK(false, "fake: `", name, "` is handed tensors of ", *device, " and ", one.device());
    }
    device = one.device();
    auto grows = writes && !one.numel();  // an op that sizes what it writes
    all.push_back({one, grows ? at::empty({0}, one.options().device(at::kCPU)) : on_host(one), writes});
    return all.back().host;
  };
  for (size_t at = 0; at < count; ++at) {
    auto& value = (*stack)[base + at];
    auto* alias = schema.arguments()[at].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      value = host_of(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      auto made = c10::List<at::Tensor>();
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(host_of(one, writes));
      value = made;
    } else if (value.isOptionalTensorList()) {
      auto made = c10::List<std::optional<at::Tensor>>();
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
        made.push_back(one ? std::optional(host_of(*one, writes)) : std::nullopt);
      value = made;
    } else if (value.isDevice()) {
      if (!device) device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
  }
  auto on = Guard::known(device.value_or(Guard::device(current)));
  const c10::DeviceGuard guard(on);
  auto who = agent_on(on.index());
  op.callBoxed(stack);

  Locked held(checker().lock);
  bool waits = false;
  double takes = 0;
  std::vector<at::Tensor> fresh;
  auto own_of = [&](const at::Tensor& one) -> at::Tensor {
    if (!one.defined()) return one;
    for (auto& [own, host, writes] : all) {
      if (host.is_same(one)) return own;
      auto [low, high] = extent(own);
      auto start = reinterpret_cast<uintptr_t>(one.const_data_ptr());
      if (one.numel() && low <= start && start < high)
        return own.as_strided(one.sizes(), one.strides(), own.storage_offset() + (start - low) / own.element_size());
    }
    auto made = at::empty_strided(one.sizes(), one.strides(), one.options().device(on));
    on_host(made).copy_(one);
    fresh.push_back(made);
    return made;
  };
  for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) {
      value = own_of(value.toTensor());
    } else if (value.isTensorList()) {
      auto made = c10::List<at::Tensor>();
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(own_of(one));
      value = made;
    } else {
      waits = true;  // a number for the host
    }
  }
  for (auto& [own, host, writes] : all) {
    if (host.sizes() != own.sizes()) on_host(at::native::resize_(own, host.sizes())).copy_(host);
    takes += seconds(own);
  }
  for (auto& made : fresh) takes += seconds(made);
  checker().queue(who, takes, now);
  for (auto& [own, host, writes] : all) {
    touch(who, own, false, name);
    if (writes) touch(who, own, true, name);
  }
  for (auto& made : fresh) touch(who, made, true, name);
  if (waits) synchronize(who);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", [](const at::Tensor& one, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format)
                        -> const at::Tensor& { return at::native::resize_(one, C10_AS_INTARRAYREF_SLOW(size), format); });
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// The host itself: an op on the CPU that is handed pinned memory reads or writes it there and then.
std::unique_ptr<at::ObserverContext> on_the_host(const at::RecordFunction& called) {
  std::vector<std::pair<at::Tensor, size_t>> found;
  for (size_t at = 0; at < called.inputs().size(); ++at) {
    const auto& value = called.inputs()[at];
    if (value.isDevice() && value.toDevice().type() == KIND) return nullptr;
    auto each = value.isTensor() ? std::vector{value.toTensor()}
                                 : value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
    for (const auto& one : each) {
      if (!one.defined() || one.unsafeGetTensorImpl()->is_python_dispatch()) continue;
      if (one.device().type() == KIND) return nullptr;
      if (one.is_cpu() && one.has_storage()) found.emplace_back(one, at);
    }
  }
  Locked held(checker().lock);
  for (const auto& [one, at] : found) {
    auto [low, high] = extent(one);
    if (auto* block = checker().of(low); !block || block->owner != HOST) continue;
    auto schema = called.operator_schema();
    if (!schema) return nullptr;
    for (const auto& made : schema->returns())
      if (made.alias_info() && !made.alias_info()->isWrite()) return nullptr;  // a view
    if (schema->name() == "aten::record_stream" || schema->name() == "aten::is_pinned") return nullptr;
    auto* alias = schema->arguments()[at].alias_info();
    checker().access(HOST, low, high, alias && alias->isWrite(), schema->name().substr(6));
  }
  return nullptr;
}

std::vector<std::string> reports() {
  Locked held(checker().lock);
  return {checker().reports.begin(), checker().reports.end()};
}
void reset() {
  Locked held(checker().lock);
  checker().reset();
  ++resets;
}
void setup() {
  static bool once = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::addGlobalCallback(at::RecordFunctionCallback(&on_the_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    return true;
  }();
  (void)once;
}

TORCH_LIBRARY(fake_accelerator, m) {
  m.def("setup() -> ()", &setup);
  m.def("reset() -> ()", &reset);
  m.def("reports() -> str[]", &reports);
  m.def("count() -> int", [] { return int64_t(DEVICES); });
  m.def("now() -> float", [] { return double(now); });
  m.def("current() -> int", [] { return int64_t(current); });
}

}  // namespace fake
