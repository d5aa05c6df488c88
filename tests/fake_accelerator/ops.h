// Ops on the devices: what they compute, what they use, and when the host waits for them.
#pragma once

#include <ATen/DeviceGuard.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/record_function.h>

#include "generators.h"
#include "guard.h"

namespace fake {

constexpr double SECONDS_PER_BYTE = 1e-6;

inline Use use_of(const at::Tensor& tensor, bool writes) {
  auto low = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (!tensor.numel()) return {low, low, writes};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {low, low + (last + 1) * tensor.element_size(), writes};
}
inline double seconds(const at::Tensor& tensor) { return tensor.nbytes() * SECONDS_PER_BYTE; }
inline at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

inline at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A copy on the stream where CUDA has it: that of the device, or between two that of the source, and each of the two
// current streams waits for the other.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::DisableRecordFunctionGuard unseen;
  bool from_host = from.is_cpu(), to_host = to.is_cpu();
  {
    Locked lock(checker().lock);
    auto device = from_host ? to.device().index() : from.device().index();
    auto stream = agent_on(device), target_stream = to_host ? stream : agent_on(to.device().index());
    std::string name = stream == target_stream ? "copy" : "copy between devices";
    if (from_host || to_host) name = from_host ? "copy to the device" : "copy to the host";
    bool pageable = (from_host && !from.is_pinned()) || (to_host && !to.is_pinned());
    bool waits = (from_host || to_host) && (!non_blocking || (to_host && pageable));
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
  (to_host ? to : on_host(to)).copy_(from_host ? from : on_host(from));
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  at::DisableRecordFunctionGuard unseen;
  {
    Locked lock(checker().lock);
    auto stream = agent_on(tensor.device().index());
    refuse_wait("item");
    queue(stream, {"item", seconds(tensor), {use_of(tensor, false)}});
    synchronize(stream, "item");
  }
  return on_host(tensor).item();
}
inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

struct Argument {
  at::Tensor tensor, host;
  bool writes, reads, sizes;
};

// Whether the host reads a result, or how large it is.
inline bool makes_host_wait(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const auto& result : op.schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType)
      return true;
  bool writes_number = stack.size() > 2 && stack[2].isTensor() && stack[2].toTensor().is_cpu();  // by masked_fill
  for (const auto& value : stack)  // a mask as an index
    if (value.isOptionalTensorList() && !writes_number)
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorList())
        if (index && index->defined() && index->element_size() == 1)
          return true;
  return op.hasTag(at::Tag::dynamic_output_shape) && op.schema().name() != "aten::index";
}
// Call the function with each tensor among the results of an op, in order, and put there what it returns.
template <class Replace>
inline void replace_results(torch::jit::Stack& stack, size_t count, Replace replace) {
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

// Products of matrices share a workspace of their stream, which the first of them allocates, as cuBLAS does.
inline std::map<Agent, c10::DataPtr>& workspaces() {
  static auto* by_stream = new std::map<Agent, c10::DataPtr>;
  return *by_stream;
}
inline void clear_workspaces() {
  Locked lock(checker().lock);
  workspaces().clear();
}
inline void add_workspace(Work& work, Agent stream) {
  constexpr size_t bytes = 512;
  if (work.name != "mm" && work.name != "addmm" && work.name != "bmm" && work.name != "baddbmm") return;
  // The first product of a thread makes its handle (pytorch/pytorch#99397).
  static thread_local bool has_handle = false;
  if (!std::exchange(has_handle, true)) refuse_wait("cublasCreate");
  auto& workspace = workspaces()[stream];
  if (!workspace) workspace = memory.allocate(bytes);
  auto low = reinterpret_cast<uintptr_t>(workspace.get());
  work.uses.push_back({low, low + bytes, true});
}

// Any other op: on the host's view of its tensors, and what comes out in memory of the device.
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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
  auto host_of = [&](const at::Tensor& tensor, bool writes, bool reads, bool is_out) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      TORCH_CHECK(tensor.dim() == 0, "fake: `", name, "` is handed a tensor of a device, and one of the CPU");
      if (captures().empty()) return tensor;
      auto copy = tensor.clone();  // a replay has the number of now
      // A number of Python is computed with in the dtype of the tensors, and not in double.
      copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return copy;
    }
    if (device && tensor.device() != *device) {
      Locked lock(checker().lock);
      checker().reports.insert("devices: `" + name + "` is handed tensors of two devices");
      TORCH_CHECK(false, "fake: `", name, "` is handed tensors of ", *device, " and ", tensor.device());
    }
    device = tensor.device();
    // An op that sizes what it writes; a loss shrinks it, from the shape of its input to a number.
    bool sizes = writes && (!tensor.numel() || (is_out && !tensor.dim()));
    auto host = sizes ? at::empty({0}, tensor.options().device(at::kCPU)) : on_host(tensor);
    tensors.push_back({tensor, host, writes, reads, sizes});
    return host;
  };
  std::optional<size_t> generator_position;
  for (size_t position = 0; position < count; ++position) {
    auto& value = arguments[position];
    const auto& argument = schema.arguments()[position];
    // The schema hides that running statistics are written.
    bool is_running = name == "batch_norm_update_stats" && argument.name().starts_with("running_");
    bool writes = is_running || (argument.alias_info() && argument.alias_info()->isWrite());
    bool is_out = argument.is_out(), reads = !writes || !(overwrites || is_out);
    if (value.isTensor()) {
      value = host_of(value.toTensor(), writes, reads, is_out);
    } else if (value.isTensorList()) {
      auto hosts = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(host_of(tensor, writes, reads, is_out));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      auto hosts = c10::List<std::optional<at::Tensor>>();
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        hosts.push_back(tensor ? std::optional(host_of(*tensor, writes, reads, is_out)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice()) {
      if (!device) device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
    if (argument.name() == "generator") generator_position = position;
  }
  auto run_device = Guard::with_index(device.value_or(Guard::device(current)));
  const c10::DeviceGuard guard(run_device);
  auto stream = agent_on(run_device.index());
  std::function<at::Generator()> generator;
  Capture* capture;
  {
    Locked lock(checker().lock);
    capture = capture_for_work(stream, name);
    if (waits) refuse_wait(name);
    if (is_random) {
      TORCH_CHECK(generator_position, "fake: `", name, "` draws numbers, and takes no generator");
      auto& value = arguments[*generator_position];
      auto source = value.isNone() ? default_generator(run_device.index()) : value.toGenerator();
      generator = draw(state_of(source), stream, name);
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

  Locked lock(checker().lock);
  // Results in new memory; and by position the host's view of each, undefined for a view of an argument.
  std::vector<at::Tensor> new_tensors, new_hosts;
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
  std::vector<std::pair<at::Tensor, at::Tensor>> sized;
  for (auto& [tensor, host, writes, reads, sizes] : tensors) {
    if (sizes) sized.emplace_back(on_host(at::native::resize_(tensor, host.sizes())).copy_(host), host);
    work.seconds += seconds(tensor);
    if (reads) work.uses.push_back(use_of(tensor, false));
    if (writes) work.uses.push_back(use_of(tensor, true));
  }
  for (auto& tensor : new_tensors) {
    work.seconds += seconds(tensor);
    work.uses.push_back(use_of(tensor, true));
  }
  add_workspace(work, stream);
  if (capture)
    work.run = [call, arguments, result_count, new_hosts, sized] {
      for (const auto& [memory, host] : sized) host.resize_({0});
      auto results = call(arguments);
      auto host = new_hosts.begin();
      replace_results(results, result_count, [&](const at::Tensor& result) {
        if (host->defined()) host->copy_(result);
        ++host;
        return result;
      });
      for (const auto& [memory, host] : sized) memory.copy_(host);
    };
  queue(stream, std::move(work));
  if (waits) synchronize(stream, name);
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace fake
