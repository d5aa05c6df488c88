// Generators of the device, which draw by seed and offset alone, as Philox: an op draws from a generator of the CPU
// that both make. So a graph that has an op's offset draws, at each replay, by the seed and offset of then.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "capture.h"

namespace fake {

struct FakeGenerator final : c10::GeneratorImpl {
  static constexpr uint64_t OFFSET_OF_AN_OP = 4;
  DrawStatePointer state = std::make_shared<DrawState>();

  explicit FakeGenerator(c10::DeviceIndex index)
      : GeneratorImpl({KIND, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void refuse_in_capture() {
    Locked lock(checker().lock);
    if (auto* capture = capture_of(agent_on(device().index())))
      refuse(capture, "a generator is seeded or set while its stream is captured; do it before the replay.");
  }
  void set_current_seed(uint64_t seed) override {
    refuse_in_capture();
    *state = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    refuse_in_capture();
    state->offset = offset;
  }
  uint64_t get_offset() const override { return state->offset; }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state->seed;
  }
  void set_state(const c10::TensorImpl& bytes) override {
    refuse_in_capture();
    *state = *static_cast<const DrawState*>(bytes.data());
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({sizeof(DrawState)}, at::kByte);
    *static_cast<DrawState*>(bytes.data_ptr()) = *state;
    return bytes.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& generator) override {
    state = static_cast<FakeGenerator&>(*generator).state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto generator = c10::make_intrusive<FakeGenerator>(device().index());
    generator->state = state;
    return generator;
  }
  FakeGenerator* clone_impl() const override {
    auto* generator = new FakeGenerator(device().index());
    *generator->state = *state;
    return generator;
  }
};

inline at::Generator generator_at(uint64_t seed, uint64_t offset) {
  return at::detail::createCPUGenerator(seed + offset * 0x9E3779B97F4A7C15);
}
inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> generators;
    for (int n = 0; n < DEVICES; ++n) generators.push_back(at::make_generator<FakeGenerator>(n));
    return generators;
  }();
  return generators[index < 0 ? current : index];
}
inline DrawStatePointer state_of(const at::Generator& generator) {
  auto device = generator.device();
  TORCH_CHECK(device.type() == KIND, "fake: expected a generator of fake, found one of ", device);
  return static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl())->state;
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

}  // namespace fake
