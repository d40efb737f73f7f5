// The simulated device as torch sees it; `operators.cpp` is written on top of it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>

#include "checker.h"

namespace sim {

// Random numbers as on CUDA: the state is a seed and how many numbers were drawn, 16 bytes.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_, offset_ = 0;
  explicit Generator(c10::DeviceIndex device);
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  Generator* clone_impl() const override;
};

c10::Allocator* allocator();
const at::Generator& default_generator(int device);
int current_device();
int current_stream(int device);  // of this thread

}  // namespace sim
