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
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

#include "capture.h"

namespace fake {

constexpr double SECONDS_PER_BYTE = 1e-6;

Checker& checker() {
  static Checker* checker = [] {
    auto* checker = new Checker;
    checker->add(-1);  // the host
    for (int n = 0; n < DEVICES; ++n) checker->shared.insert(checker->add(n));  // and the default stream of each device
    return checker;
  }();
  return *checker;
}

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, DEVICES> streams{};
// This thread of the host, on the time of the streams; 0 once all is reset.
std::atomic<int> resets{0};
struct HostTime {
  double time = 0;
  int reset = 0;
  operator double() {
    if (std::exchange(reset, resets) != resets) time = 0;
    return time;
  }
  void reach(double event_time) { time = std::max(double(*this), event_time); }
};
thread_local HostTime now;
double host_time() { return now; }

Agent agent_of(c10::Stream stream) { return stream.id() ? stream.id() : 1 + stream.device_index(); }
void synchronize(Agent stream, const std::string& name) {
  refuse_wait(name);
  checker().synchronize(stream);
  now.reach(checker().time(stream));
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
    Locked held(checker().lock);
    synchronize(agent_of(stream), "synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Locked held(checker().lock);
    for (Agent stream = 1; stream < checker().count(); ++stream)
      if (checker().device(stream) == index) synchronize(stream, "synchronize");
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked held(checker().lock);
    if (!*event) *event = new Event;
    record_event(agent_of(stream), *static_cast<Event*>(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked held(checker().lock);
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
    Locked held(checker().lock);
    if (!handle) return true;
    auto& event = event_of(handle, "event.query");
    bool has_passed = std::exchange(event.asked, true) || checker().passed(event);
    if (has_passed) synchronizeEvent(handle);
    return has_passed;
  }
  void synchronizeEvent(void* handle) const override {
    Locked held(checker().lock);
    if (!handle) return;
    auto& event = event_of(handle, "event.synchronize");
    checker().synchronize(event);
    now.reach(event.time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    Locked held(checker().lock);
    auto &first = event_of(start, "event.elapsed_time"), &last = event_of(end, "event.elapsed_time");
    TORCH_CHECK(checker().passed(first) && checker().passed(last), "fake: an event has not happened yet");
    return (last.time - first.time) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked held(checker().lock);
    checker().record_stream(reinterpret_cast<uintptr_t>(data.get()), agent_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory: of the device that is current, for the stream that is; or of the host, pinned. What is allocated while that
// stream is captured is of the graph's pool.
void* allocate_memory(size_t bytes, Agent owner) {
  Locked held(checker().lock);
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
void release_memory(void* memory) {
  Locked held(checker().lock);
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
Memory memory;
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
Pinned pinned;
REGISTER_HOST_ALLOCATOR(KIND, &pinned)

// Generators.
void refuse_change_in_capture(const c10::Device& device) {
  Locked held(checker().lock);
  if (auto* capture = capture_of(agent_on(device.index())))
    refuse(capture, "a generator is seeded or set while its stream is captured; do it before the replay.");
}
void FakeGenerator::set_current_seed(uint64_t seed) {
  refuse_change_in_capture(device());
  *state = {seed, 0};
}
void FakeGenerator::set_offset(uint64_t offset) {
  refuse_change_in_capture(device());
  state->offset = offset;
}
uint64_t FakeGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return state->seed;
}
void FakeGenerator::set_state(const c10::TensorImpl& bytes) {
  refuse_change_in_capture(device());
  *state = *static_cast<const DrawState*>(bytes.data());
}
c10::intrusive_ptr<c10::TensorImpl> FakeGenerator::get_state() const {
  auto bytes = at::empty({sizeof(DrawState)}, at::kByte);
  *static_cast<DrawState*>(bytes.data_ptr()) = *state;
  return bytes.getIntrusivePtr();
}
void FakeGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& generator) {
  state = static_cast<FakeGenerator&>(*generator).state;
}
c10::intrusive_ptr<c10::GeneratorImpl> FakeGenerator::graphsafe_get_state() const {
  auto generator = c10::make_intrusive<FakeGenerator>(device().index());
  generator->state = state;
  return generator;
}
FakeGenerator* FakeGenerator::clone_impl() const {
  auto* generator = new FakeGenerator(device().index());
  *generator->state = *state;
  return generator;
}
at::Generator generator_at(uint64_t seed, uint64_t offset) {
  return at::detail::createCPUGenerator(seed + offset * 0x9E3779B97F4A7C15);
}
const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> generators;
    for (int n = 0; n < DEVICES; ++n) generators.push_back(at::make_generator<FakeGenerator>(n));
    return generators;
  }();
  return generators[index < 0 ? current : index];
}
DrawStatePointer state_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == KIND, "fake: expected a generator of fake, found one of ", generator.device());
  return static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl())->state;
}

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
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<FakeGenerator>(index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* address) const override {
    Locked held(checker().lock);
    auto* block = checker().of(reinterpret_cast<uintptr_t>(address));
    return block && block->owner == HOST;
  }
};

// Ops.
Use use_of(const at::Tensor& tensor, bool writes) {
  auto low = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (!tensor.numel()) return {low, low, writes};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {low, low + (last + 1) * tensor.element_size(), writes};
}
double seconds(const at::Tensor& tensor) { return tensor.nbytes() * SECONDS_PER_BYTE; }
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
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
    auto stream = agent_on(device), target_stream = back ? stream : agent_on(to.device().index());
    std::string name = out ? "copy to the device" : back ? "copy to the host" : stream == target_stream ? "copy" : "copy between devices";
    bool pageable = (out && !from.is_pinned()) || (back && !to.is_pinned());
    bool waits = (out || back) && (!non_blocking || (back && pageable));
    if (waits) refuse_wait(name);
    auto* capture = capture_for_work(stream, name);
    if (capture && pageable) refuse(capture, "`" + name + "` uses memory that is not pinned; call pin_memory before.");
    Work work{name, seconds(to), {use_of(from, false), use_of(to, true)}};
    if (capture) {
      capture->save(work.uses.back());
      work.run = [source = on_host(from), target = on_host(to)] { target.copy_(source); };
    }
    if (stream != target_stream) make_wait(stream, target_stream);
    queue(stream, std::move(work));
    auto end = checker().time(stream);
    if (stream != target_stream) make_wait(target_stream, stream);
    if (waits) synchronize(stream, name);
    if (pageable) now.reach(end);
  }
  (back ? to : on_host(to)).copy_(out ? from : on_host(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  at::DisableRecordFunctionGuard unseen;
  {
    Locked held(checker().lock);
    auto stream = agent_on(tensor.device().index());
    refuse_wait("item");
    queue(stream, {"item", seconds(tensor), {use_of(tensor, false)}});
    synchronize(stream, "item");
  }
  return on_host(tensor).item();
}
void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

struct Argument {
  at::Tensor tensor, host;
  bool writes, reads;
};

// Whether the host reads a result, or how large it is.
bool makes_host_wait(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const auto& result : op.schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType) return true;
  bool writes_number = stack.size() > 2 && stack[2].isTensor() && stack[2].toTensor().is_cpu();  // by masked_fill
  for (const auto& value : stack)  // a mask as an index
    if (value.isOptionalTensorList() && !writes_number)
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorList())
        if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return op.hasTag(at::Tag::dynamic_output_shape) && op.schema().name() != "aten::index";
}
// Call the function with each tensor among the results of an op, in order, and put there what it returns.
template <class Replace>
void replace_results(torch::jit::Stack& stack, size_t count, Replace replace) {
  for (size_t position = stack.size() - count; position < stack.size(); ++position) {
    auto& value = stack[position];
    if (value.isTensor()) {
      value = replace(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
      value = tensors;
    }
  }
}

// Any other op: on the host's view of its tensors, and what comes out in memory of the device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::DisableRecordFunctionGuard unseen;
  const auto& schema = op.schema();
  auto name = schema.name().substr(schema.name().find("::") + 2);
  auto count = schema.arguments().size(), base = stack->size() - count, result_count = schema.returns().size();
  bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  // What an op writes whole, it does not read.
  bool overwrites = is_random || name == "fill_" || name == "zero_" || name == "_foreach_zero_";
  torch::jit::Stack arguments(stack->end() - count, stack->end());
  bool waits = makes_host_wait(op, arguments);
  std::vector<Argument> tensors;
  std::optional<c10::Device> device;
  auto host_of = [&](const at::Tensor& tensor, bool writes, bool reads) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      TORCH_CHECK(tensor.dim() == 0, "fake: `", name, "` is handed a tensor of a device, and one of the CPU");
      return captures().empty() ? tensor : tensor.clone();  // a replay has the number of now
    }
    if (device && tensor.device() != *device) {
      Locked held(checker().lock);
      checker().reports.insert("devices: `" + name + "` is handed tensors of two devices");
      TORCH_CHECK(false, "fake: `", name, "` is handed tensors of ", *device, " and ", tensor.device());
    }
    device = tensor.device();
    auto grows = writes && !tensor.numel();  // an op that sizes what it writes
    auto host = grows ? at::empty({0}, tensor.options().device(at::kCPU)) : on_host(tensor);
    tensors.push_back({tensor, host, writes, reads});
    return host;
  };
  std::optional<size_t> generator_position;
  for (size_t position = 0; position < count; ++position) {
    auto& value = arguments[position];
    const auto& argument = schema.arguments()[position];
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    bool reads = !writes || !(overwrites || argument.is_out());
    if (value.isTensor()) {
      value = host_of(value.toTensor(), writes, reads);
    } else if (value.isTensorList()) {
      auto hosts = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(host_of(tensor, writes, reads));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      auto hosts = c10::List<std::optional<at::Tensor>>();
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        hosts.push_back(tensor ? std::optional(host_of(*tensor, writes, reads)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice()) {
      if (!device) device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
    if (argument.name() == "generator") generator_position = position;
  }
  auto run_device = Guard::known(device.value_or(Guard::device(current)));
  const c10::DeviceGuard guard(run_device);
  auto stream = agent_on(run_device.index());
  std::function<at::Generator()> generator;
  Capture* capture;
  {
    Locked held(checker().lock);
    capture = capture_for_work(stream, name);
    if (waits) refuse_wait(name);
    if (is_random) {
      TORCH_CHECK(generator_position, "fake: `", name, "` draws numbers, and takes no generator");
      auto& value = arguments[*generator_position];
      generator = draw(state_of(value.isNone() ? default_generator(run_device.index()) : value.toGenerator()), stream, name);
    }
    if (capture)
      for (const auto& argument : tensors) capture->save(use_of(argument.tensor, argument.writes));
  }
  // Run the op on the host, now and at each replay.
  auto call = [op, generator, generator_position](torch::jit::Stack arguments) {
    if (generator) arguments[*generator_position] = generator();
    op.callBoxed(&arguments);
    return arguments;
  };
  auto results = call(arguments);

  Locked held(checker().lock);
  std::vector<at::Tensor> new_tensors, new_hosts;  // the results; on the host, in order, undefined for those that are views
  replace_results(results, result_count, [&](const at::Tensor& result) -> at::Tensor {
    new_hosts.emplace_back();
    if (!result.defined()) return result;
    for (auto& argument : tensors) {
      if (argument.host.is_same(result)) return argument.tensor;
      auto memory = use_of(argument.tensor, false);
      auto start = reinterpret_cast<uintptr_t>(result.const_data_ptr());
      if (result.numel() && memory.low <= start && start < memory.high)
        return argument.tensor.as_strided(result.sizes(), result.strides(), argument.tensor.storage_offset() +
                                          (start - memory.low) / argument.tensor.element_size());
    }
    auto tensor = at::empty_strided(result.sizes(), result.strides(), result.options().device(run_device));
    new_hosts.back() = on_host(tensor).copy_(result);
    new_tensors.push_back(tensor);
    return tensor;
  });
  Work work{name};
  std::vector<std::pair<at::Tensor, at::Tensor>> grown;
  for (auto& [tensor, host, writes, reads] : tensors) {
    if (host.sizes() != tensor.sizes())
      grown.emplace_back(on_host(at::native::resize_(tensor, host.sizes())).copy_(host), host);
    work.seconds += seconds(tensor);
    if (reads) work.uses.push_back(use_of(tensor, false));
    if (writes) work.uses.push_back(use_of(tensor, true));
  }
  for (auto& tensor : new_tensors) {
    work.seconds += seconds(tensor);
    work.uses.push_back(use_of(tensor, true));
  }
  if (capture)
    work.run = [call, arguments, result_count, new_hosts, grown] {
      auto results = call(arguments);
      auto host = new_hosts.begin();
      replace_results(results, result_count, [&](const at::Tensor& result) {
        if (host->defined()) host->copy_(result);
        ++host;
        return result;
      });
      for (const auto& [memory, host] : grown) memory.copy_(host);
    };
  queue(stream, std::move(work));
  if (waits) synchronize(stream, name);
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", [](const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format)
                        -> const at::Tensor& { return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format); });
  m.impl("native_dropout", &at::native::native_dropout_cpu);  // of ops that are this device's
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// The host itself: an op on the CPU that is handed pinned memory reads or writes it there and then.
std::unique_ptr<at::ObserverContext> on_the_host(const at::RecordFunction& called) {
  std::vector<std::pair<at::Tensor, size_t>> host_tensors;
  for (size_t position = 0; position < called.inputs().size(); ++position) {
    const auto& value = called.inputs()[position];
    if (value.isDevice() && value.toDevice().type() == KIND) return nullptr;
    auto tensors = value.isTensor() ? std::vector{value.toTensor()}
                                    : value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) continue;
      if (tensor.device().type() == KIND) return nullptr;
      if (tensor.is_cpu() && tensor.has_storage()) host_tensors.emplace_back(tensor, position);
    }
  }
  Locked held(checker().lock);
  for (const auto& [tensor, position] : host_tensors) {
    auto use = use_of(tensor, false);
    if (auto* block = checker().of(use.low); !block || block->owner != HOST) continue;
    auto schema = called.operator_schema();
    if (!schema) return nullptr;
    for (const auto& result : schema->returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return nullptr;  // a view
    if (schema->name() == "aten::record_stream" || schema->name() == "aten::is_pinned") return nullptr;
    auto* alias = schema->arguments()[position].alias_info();
    use.writes = alias && alias->isWrite();
    checker().access(HOST, use, schema->name().substr(6));
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
// Graphs, by the number that Python has for them.
std::map<int64_t, std::unique_ptr<Graph>> graphs;
int64_t new_pool() {
  static std::atomic<int64_t> pools{0};
  return ++pools;
}
int64_t new_graph() {
  static std::atomic<int64_t> count{0};
  Locked held(checker().lock);
  graphs[++count] = std::make_unique<Graph>();
  return count;
}
void delete_graph(int64_t graph) {
  Locked held(checker().lock);
  graphs.erase(graph);
}
void capture_begin(int64_t graph, int64_t pool, std::string mode) {
  graphs.at(graph)->capture_begin(current, state_of(default_generator(current)), pool ? pool : new_pool(), mode);
}
bool is_capturing() {
  Locked held(checker().lock);
  return capture_of(agent_on(current));
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
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(index); });
  m.def("new_pool() -> int", &new_pool);
  m.def("new_graph() -> int", &new_graph);
  m.def("delete_graph(int graph) -> ()", &delete_graph);
  m.def("capture_begin(int graph, int pool, str mode) -> ()", &capture_begin);
  m.def("capture_end(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->capture_end(); });
  m.def("replay(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->replay(); });
  m.def("reset_graph(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->reset(); });
  m.def("pool_of(int graph) -> int", [](int64_t graph) { return graphs.at(graph)->pool; });
  m.def("is_capturing() -> bool", &is_capturing);
  m.def("register_generator(int graph, Generator? generator) -> ()", [](int64_t graph, std::optional<at::Generator> generator) {
    graphs.at(graph)->register_state(state_of(*generator));
  });
}

}  // namespace fake
