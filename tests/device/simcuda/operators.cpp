// Ops on the simulated device: each runs at once on the CPU and is booked on the current stream.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <functional>

namespace sim {
namespace {

using at::Tensor;
using Sizes = c10::IntArrayRef;

// Ops that run another op are booked once: what happens inside is theirs.
thread_local int t_inside = 0;
struct Inside {
  Inside() { ++t_inside; }
  ~Inside() { --t_inside; }
};

int stream_of(const Tensor& tensor) { return current_stream(tensor.get_device()); }

Op book(const std::string& name, int stream) {
  return t_inside ? Op() : Checker::get().book(name, stream);
}

void access(const Op& op, const Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) return;
  int64_t low = 0, high = 0;  // in elements, from the first
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t reach = (tensor.size(dim) - 1) * tensor.stride(dim);
    (reach < 0 ? low : high) += reach;
  }
  const auto first = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const auto size = static_cast<int64_t>(tensor.element_size());
  Checker::get().access(op, first + low * size, first + (high + 1) * size, write);
}

// The same memory as a CPU tensor.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) use(tensor);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) each_tensor(element, use);
  }
}

// Whether the size of the result depends on values: there CUDA makes the host wait.
bool waits(const std::string& name) {
  static const std::set<std::string> found = {
      "aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::equal", "aten::is_nonzero",
      "aten::unique_consecutive"};
  return found.count(name) > 0;
}

double flops_of(const std::string& name, const std::vector<Tensor>& inputs) {
  const size_t left = name == "aten::addmm" ? 1 : 0;
  const bool multiplies = left || name == "aten::mm" || name == "aten::bmm";
  if (!multiplies || inputs.size() < left + 2) return 0;
  return 2.0 * inputs[left].numel() * inputs[left + 1].size(-1);
}

// Replace the device's generator by one for the CPU, seeded by its state; returns the former.
at::Generator draw_from_cpu(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto& args = schema.arguments();
  const size_t first = stack->size() - args.size();
  at::Generator found;
  for (size_t i = 0; i < args.size(); ++i) {
    auto& value = (*stack)[first + i];
    const bool left_out = value.isNone() && args[i].type()->str() == "Generator?";
    if (!left_out && !value.isGenerator()) continue;
    const auto given = left_out ? default_generator(current_device()) : value.toGenerator();
    if (given.device().type() != c10::DeviceType::CUDA) continue;
    found = given;
    const auto* state = found.get<Generator>();
    value = at::detail::createCPUGenerator(state->seed_ * 0x9E3779B97F4A7C15ull + state->offset_);
  }
  return found;
}

// Any op that has no kernel below: book it by its schema, then run it on the CPU.
void run(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto& args = schema.arguments();
  const size_t first = stack->size() - args.size(), returns = schema.returns().size();
  const std::string& name = schema.name();
  int stream = current_stream(-1);
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < args.size(); ++i)
    each_tensor((*stack)[first + i], [&](const Tensor& tensor) {
      if (tensor.is_cuda()) stream = stream_of(tensor), inputs.push_back(tensor);
    });
  const Op op = book(name, stream);
  for (size_t i = 0; i < args.size(); ++i) {
    const bool write = args[i].alias_info() != nullptr && args[i].alias_info()->isWrite();
    each_tensor((*stack)[first + i], [&](const Tensor& tensor) { access(op, tensor, write); });
  }
  if (op.at) {
    double bytes = 0;
    for (const Tensor& tensor : inputs) bytes += static_cast<double>(tensor.nbytes());
    Checker::get().work(stream, bytes, flops_of(name, inputs));
    if (waits(name)) Checker::get().host_waits(stream, name.c_str());
  }
  const auto drawn_from = draw_from_cpu(schema, stack);
  {
    Inside inside;
    at::native::cpu_fallback(handle, stack, false, c10::DispatchKey::CPU);
  }
  if (drawn_from.defined()) {
    int64_t most = 1;
    for (const Tensor& tensor : inputs) most = std::max(most, tensor.numel());
    drawn_from.get<Generator>()->offset_ += 4 * ((most + 1023) / 1024);
  }
  for (size_t i = stack->size() - returns; i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const Tensor& tensor) { access(op, tensor, true); });
}

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor view_as(const Tensor& self, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  at::native::setStrided(made, size, stride, offset.value_or(self.storage_offset()));
  return made;
}

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return view_as(self, size, stride, self.storage_offset());
}

Tensor view(const Tensor& self, Sizes size) {
  const at::DimVector shape = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return reshape_alias(self, shape, *stride);
}

const Tensor& grow(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  const auto need = at::detail::computeStorageNbytesContiguous(size, self.element_size(),
                                                               self.storage_offset());
  auto& storage = self.storage();
  if (need > storage.nbytes()) {
    auto data = allocator()->allocate(need);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set(Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  const int stream = stream_of(self.is_cuda() ? self : source);
  const bool crosses = self.is_cuda() != source.is_cuda();
  const char* name = !crosses ? "aten::copy_" : self.is_cuda() ? "copy to device" : "copy to host";
  const Op op = book(name, stream);
  access(op, source, false);
  access(op, self, true);
  if (op.at) {
    Checker::get().work(stream, 2.0 * self.nbytes(), 0);
    if (crosses && !non_blocking) Checker::get().host_waits(stream, name);
  }
  Inside inside;
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  Tensor self = to;
  return copy(self, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (to.is_cuda() && to.sizes() != source.sizes()) grow(to, source.sizes(), std::nullopt);
  return copy_from(source, to, false);
}

at::Scalar item(const Tensor& self) {
  const Op op = book("item", stream_of(self));
  access(op, self, false);
  if (op.at) Checker::get().host_waits(op.stream, ".item()");
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  const auto first = reinterpret_cast<uintptr_t>(self.storage().data());
  Checker::get().record_stream(first, static_cast<int>(stream.id()));
}

int64_t attention_by_plain_ops(const Tensor&, const Tensor&, const Tensor&,
                               const std::optional<Tensor>&, double, bool, std::optional<double>,
                               bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", view_as);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", grow);
  m.impl("set_.source_Storage_storage_offset", set);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_by_plain_ops);
  // Without a kernel it is made of other ops, and rounds 16-bit values elsewhere than the CPU's.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace sim
