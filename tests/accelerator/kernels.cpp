// The accelerator's kernels (see device.h): the CPU's, on aliases of its memory.

#include "device.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

struct Launch {  // of one kernel: aliases of what it works on, what it reads and writes, and its time on the stream
  std::string name;
  Stream stream;
  double begin = now(), worked = busy();
  std::map<c10::StorageImpl*, c10::Storage> aliases;
  std::vector<std::pair<Tensor, Tensor>> written;  // ours, the alias
  std::map<Block*, bool> uses;

  Launch(std::string name, DeviceIndex device) : name(std::move(name)), stream(current_stream(device)) {
    std::lock_guard lock(mutex);
    check_alive(this->name.c_str());
  }

  Tensor alias(const Tensor& ours, bool writes) {
    if (!ours.defined() || ours.device().type() != kOurs) return ours;
    const auto& storage = ours.storage();
    auto& known = aliases[storage.unsafeGetStorageImpl()];
    if (!known) {
      at::DataPtr data(storage.mutable_data(), new c10::Storage(storage), [](void* s) { delete static_cast<c10::Storage*>(s); }, c10::kCPU);
      known = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(known), c10::DispatchKeySet(c10::DispatchKey::CPU), ours.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
    if (auto* block = static_cast<Block*>(storage.data_ptr().get_context())) uses[block] |= writes;
    if (writes) written.emplace_back(ours, made);
    return made;
  }

  Tensor ours(const Tensor& result) {  // a result, on our device
    if (!result.defined()) return result;
    for (const auto& [mine, alias] : written)
      if (alias.is_same(result)) return mine;
    c10::Storage storage;
    for (const auto& [impl, alias] : aliases)
      if (alias.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        storage = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
    if (!storage) storage = adopted(result);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kKey), result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return made;
  }

  c10::Storage adopted(const Tensor& result) {
    const auto& from = result.storage();
    const size_t size = from.nbytes();
    at::DataPtr keep(from.mutable_data(), new c10::Storage(from), [](void* s) { delete static_cast<c10::Storage*>(s); }, c10::kCPU);
    int number;
    {
      std::lock_guard lock(mutex);
      number = queue_of(stream).first;
    }
    auto* block = memory.adopt(std::move(keep), size, stream.device_index(), number);
    uses[block] = true;
    at::DataPtr data(block->ptr, block, &Memory::give_back, stream.device());
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data), &memory, true);
  }

  void end() {
    for (auto& [mine, alias] : written) {  // what the kernel has resized
      auto* storage = mine.storage().unsafeGetStorageImpl();
      if (alias.storage().data() != storage->data()) {
        auto data = adopted(alias);
        storage->set_nbytes(data.nbytes());
        storage->set_data_ptr_noswap(data.set_data_ptr(at::DataPtr()));
      }
      if (mine.sizes() != alias.sizes() || mine.strides() != alias.strides())
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
    double wait = 0;
    {
      std::lock_guard lock(mutex);
      auto& [number, queue] = queue_of(stream);
      merge(queue.seen, host);
      for (auto& [block, writes] : uses) {
        ordered(queue.seen, number, block->writes, "writes", name);
        if (writes) ordered(queue.seen, number, block->reads, "reads", name);
      }
      kernels++;
      const uint64_t kernel = ++queue.seen[number];
      const double took = settings.kernel_seconds ? settings.kernel_seconds : settings.slowness * (busy() - worked);
      queue.end = std::max(queue.end, begin) + took;
      queue.ends.push_back(queue.end);
      if (settings.queue && queue.ends.size() > settings.queue) wait = queue.ends.front(), queue.ends.pop_front();
      for (auto& [block, writes] : uses) {
        block->reads[number] = {kernel, queue.end};
        if (writes) block->writes[number] = {kernel, queue.end};
      }
    }
    if (wait) wait_until(wait);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), first = stack->size() - arguments;
  DeviceIndex device = current;
  for (size_t i = 0; i < arguments; i++) {
    const auto& value = (*stack)[first + i];
    const Tensor* found = nullptr;
    Tensor one;
    if (value.isTensor()) one = value.toTensor(), found = &one;
    else if (value.isTensorList() && !value.toTensorList().empty()) one = value.toTensorVector()[0], found = &one;
    if (found && found->defined() && found->device().type() == kOurs) {
      device = found->device().index();
      break;
    }
    if (value.isDevice() && value.toDevice().type() == kOurs && value.toDevice().has_index()) device = value.toDevice().index();
  }
  Launch launch(schema.name(), device);
  for (size_t i = 0; i < arguments; i++) {
    auto& value = (*stack)[first + i];
    const auto* info = schema.arguments()[i].alias_info();
    const bool writes = info && info->isWrite();
    if (value.isTensor()) {
      value = launch.alias(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const auto& each : value.toTensorVector()) all.push_back(launch.alias(each, writes));
      value = c10::List<Tensor>(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        all.push_back(each ? std::optional<Tensor>(launch.alias(*each, writes)) : std::nullopt);
      value = all;
    } else if (value.isDevice() && value.toDevice().type() == kOurs) {
      value = Device(c10::kCPU);
    } else if (schema.arguments()[i].name() == "generator") {
      auto given = value.isGenerator() ? value.toGenerator() : default_random(device);
      if (auto* random = dynamic_cast<Random*>(given.unsafeGetGeneratorImpl())) value = random->cpu;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto* returned = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  const bool view = returned && !returned->isWrite();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = launch.ours(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const auto& each : value.toTensorVector()) all.push_back(launch.ours(each));
      value = c10::List<Tensor>(all);
    }
  }
  if (!view) launch.end();
}

DeviceIndex index_of(std::optional<Device> device) { return device && device->has_index() ? device->index() : current; }

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(Device(kOurs, index_of(device)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(Device(kOurs, index_of(device)));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage from, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(from));
  if (stride.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  else self.unsafeGetTensorImpl()->set_storage_offset(offset), self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool here = from.device().type() == kOurs, there = to.device().type() == kOurs;
  const Stream stream = current_stream(here ? from.device().index() : to.device().index());
  if (here && there && from.device() != to.device()) {  // both devices' streams meet, before and after
    c10::Event before(kOurs), after(kOurs);
    before.record(current_stream(to.device().index())), before.block(stream);
    Launch launch("copy between devices", stream.device_index());
    launch.alias(to, true).copy_(launch.alias(from, false));
    launch.end();
    after.record(stream), after.block(current_stream(to.device().index()));
    return to;
  }
  Launch launch("copy", stream.device_index());
  launch.alias(to, true).copy_(launch.alias(from, false));
  launch.end();
  const bool waits = here != there && !(non_blocking && is_pinned((here ? to : from).storage().data()));
  if (waits) synchronize(stream);
  return to;
}

at::Scalar local_scalar(const Tensor& self) {
  Launch launch("item", self.device().index());
  const auto value = launch.alias(self, false).item();
  launch.end();
  synchronize(launch.stream);
  return value;
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  Launch launch("convolution", x.device().index());
  std::optional<Tensor> add;
  if (bias && bias->defined()) add = launch.alias(*bias, false);
  auto out = launch.ours(at::convolution(
      launch.alias(x, false), launch.alias(weight, false), add, stride, padding, dilation, transposed, output_padding, groups));
  launch.end();
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& slope, const Tensor& x, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
    bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Launch launch("convolution_backward", x.device().index());
  const std::vector<int64_t> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [a, b, c] = at::convolution_backward(
      launch.alias(slope, false), launch.alias(x, false), launch.alias(weight, false), bias, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  std::tuple<Tensor, Tensor, Tensor> out{launch.ours(a), launch.ours(b), launch.ours(c)};
  launch.end();
  return out;
}

void record_stream(Tensor& self, Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }

int64_t attention_by_products(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // sdp::SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &attention_by_products);
}

TORCH_LIBRARY(emulated, m) {
  m.def("random_state(int device) -> Tensor", [](int64_t device) { return default_random(device).get_state(); });
  m.def("set_random_state(int device, Tensor state) -> ()", [](int64_t device, Tensor state) { default_random(device).set_state(state); });
}

}  // namespace

namespace at::autocast {
#define EMULATED_HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EMULATED_FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define EMULATED_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define EMULATED_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(EMULATED_HALF)
  AT_FORALL_FP32(EMULATED_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(EMULATED_DTYPE)
  AT_FORALL_PROMOTE(EMULATED_WIDEST)
}
}  // namespace at::autocast

extern "C" {
void emulated_open() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kOurs, &memory);
}
void emulated_seed(uint64_t seed) {
  for (DeviceIndex index = 0; index < 64; index++) default_random(index).set_current_seed(seed);
}
int emulated_set(const char* name, double value) {
  std::lock_guard lock(mutex);
  configured();
  double* known = setting(name);
  if (known) *known = value;
  return known != nullptr;
}
int emulated_count() { return count(); }
double emulated_now() { return now(); }
uint64_t emulated_kernels() { return kernels; }
uint64_t emulated_waits() { return waits; }
}
