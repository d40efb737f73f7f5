// Device guard, streams, events, allocator, generators and hooks: a device of type CUDA.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

thread_local int t_device = 0;
thread_local int t_current[kDevices] = {0, 1, 2, 3, 4, 5, 6, 7};  // default streams: ids 0 to 7

c10::Device device_at(int index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }

// Host memory full of garbage, booked on the stream that is current.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes > 0) {
      TORCH_CHECK(posix_memalign(&data, 512, nbytes) == 0, "simcuda: out of memory");
      std::memset(data, 0xC1, nbytes);  // floats of about -24
      Checker::get().allocated(reinterpret_cast<uintptr_t>(data), nbytes, t_current[t_device]);
    }
    return {data, data, &release, device_at(t_device)};
  }
  static void release(void* data) {
    if (data == nullptr) return;
    Checker::get().freed(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return device_at(t_device); }
  void setDevice(Device device) const override { t_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  static Stream stream(int id) {
    return Stream(Stream::UNSAFE, device_at(Checker::get().device_of(id)), id);
  }
  Stream getStream(Device device) const override { return stream(t_current[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index_of(device)); }
  Stream getNewStream(Device device, int) const override {
    return stream(Checker::get().new_stream(index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream next) const override {
    const int device = index_of(next.device()), before = t_current[device];
    t_current[device] = static_cast<int>(next.id());
    return stream(before);
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream& stream) const override {
    return Checker::get().over(static_cast<int>(stream.id()));
  }
  void synchronizeStream(const Stream& stream) const override {
    Checker::get().host_waits(static_cast<int>(stream.id()), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Checker::get().host_waits_for_device(device);
  }

  void record(void** event, const Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    Checker::get().record(*static_cast<Event*>(*event), static_cast<int>(stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr)
      Checker::get().block(*static_cast<Event*>(event), static_cast<int>(stream.id()));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Checker::get().over(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      Checker::get().host_waits(*static_cast<Event*>(event), "event.synchronize");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return (static_cast<Event*>(second)->time_us - static_cast<Event*>(first)->time_us) / 1e3;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Checker::get().record_stream(reinterpret_cast<uintptr_t>(data.get()),
                                 static_cast<int>(stream.id()));
  }
};

// The first generator that is made for a device is its default one; `torch_cuda.py` makes them.
std::vector<at::Generator>& default_generators() {
  static auto* made = new std::vector<at::Generator>(kDevices);
  return *made;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { t_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    t_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(t_device); }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? t_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    const int index = device < 0 ? t_device : device;
    if (!default_generators()[index].defined()) return default_generator(index);
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index));
  }
};

struct Setup {
  Setup() {
    c10::SetAllocator(c10::DeviceType::CUDA, allocator(), 100);
    static c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());
  }
} setup;

}  // namespace

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
      seed_(c10::default_rng_seed_val) {}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 16, "simcuda: a state of random numbers has 16 bytes");
  uint64_t found[2];
  std::memcpy(found, state.data(), 16);
  TORCH_CHECK(found[1] % 4 == 0, "simcuda: the offset of a generator is a multiple of 4");
  seed_ = found[0], offset_ = found[1];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  const uint64_t found[2] = {seed_, offset_};
  auto made = at::detail::empty_cpu({16}, at::kByte);
  std::memcpy(made.mutable_data_ptr(), found, 16);
  return made.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* made = new Generator(device().index());
  made->seed_ = seed_, made->offset_ = offset_;
  return made;
}

c10::Allocator* allocator() {
  static auto* made = new Memory();
  return made;
}

const at::Generator& default_generator(int device) {
  auto& found = default_generators()[device];
  if (!found.defined())
    found = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device));
  return found;
}

int current_device() { return t_device; }
int current_stream(int device) { return t_current[device < 0 ? t_device : device]; }

}  // namespace sim

namespace at {
using SimHooks = sim::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimHooks)
}  // namespace at
