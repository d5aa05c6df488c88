// An accelerator that is none, by which programs for accelerators are checked where there is no GPU.
//
//   fake:0, fake:1, ..     devices with memory, streams, events, pinned memory, asynchronous copies and graphs, as CUDA
//
// An op computes at once, on the CPU, in memory of the host: so the bits are always right. Whether they would be on a
// device, where only streams and events order what runs, is what happens_before.h finds out: here each op, copy,
// allocation and wait tells it which memory it reads and writes, and on which stream. Where CUDA waits by itself (a
// copy that blocks, one between devices, `item()`), so does this. Time is that of the streams: an op takes as long as
// it has elements, and starts once its stream, and what that waits for, is there.
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "graph.h"

namespace fake {

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
    Locked lock(checker().lock);
    auto* block = checker().of(reinterpret_cast<uintptr_t>(address));
    return block && block->owner == HOST;
  }
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", [](const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format)
                        -> const at::Tensor& {
    return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  m.impl("native_dropout", &at::native::native_dropout_cpu);  // of ops that are this device's
  // As CUDA it has a kernel, or make_fx traces other ops than run (2.13: `autograd_would_have_decomposed`).
  m.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// Autocast: products in the lower precision, and losses in float32, as CUDA has them.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
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
  Locked lock(checker().lock);
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
  Locked lock(checker().lock);
  return {checker().reports.begin(), checker().reports.end()};
}
void reset() {
  Locked lock(checker().lock);
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
  Locked lock(checker().lock);
  graphs[++count] = std::make_unique<Graph>();
  return count;
}
void delete_graph(int64_t graph) {
  Locked lock(checker().lock);
  graphs.erase(graph);
}
void capture_begin(int64_t graph, int64_t pool, std::string mode) {
  graphs.at(graph)->capture_begin(current, state_of(default_generator(current)), pool ? pool : new_pool(), mode);
}
// Add a call of the host to the graph of the current stream, as cudaLaunchHostFunc; it returns whether it failed.
void capture_call(int64_t address) {
  Locked lock(checker().lock);
  auto stream = agent_on(current);
  auto* capture = capture_of(stream);
  TORCH_CHECK(capture, "fake: a call of the host is added to a stream that is not captured.");
  auto* function = reinterpret_cast<int (*)()>(address);
  auto run = [function] { TORCH_CHECK(!function(), "fake: a call of the host failed in a replay."); };
  capture->add(stream, {"host call", 0, {}, run, true});
}
bool is_capturing() {
  Locked lock(checker().lock);
  return capture_of(agent_on(current));
}
void setup() {
  static bool once = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    auto callback = at::RecordFunctionCallback(&on_the_host).needsInputs(true).scopes({at::RecordScope::FUNCTION});
    at::addGlobalCallback(callback);
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
  m.def("clear_workspaces() -> ()", &clear_workspaces);
  m.def("new_pool() -> int", &new_pool);
  m.def("new_graph() -> int", &new_graph);
  m.def("delete_graph(int graph) -> ()", &delete_graph);
  m.def("capture_begin(int graph, int pool, str mode) -> ()", &capture_begin);
  m.def("capture_end(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->capture_end(); });
  m.def("replay(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->replay(); });
  m.def("reset_graph(int graph) -> ()", [](int64_t graph) { graphs.at(graph)->reset(); });
  m.def("pool_of(int graph) -> int", [](int64_t graph) { return graphs.at(graph)->pool; });
  m.def("capture_call(int address) -> ()", &capture_call);
  m.def("is_capturing() -> bool", &is_capturing);
  m.def("register_generator(int graph, Generator? generator) -> ()",
        [](int64_t graph, std::optional<at::Generator> generator) {
          graphs.at(graph)->register_state(state_of(*generator));
        });
}

}  // namespace fake
