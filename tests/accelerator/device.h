// An accelerator for tests: several devices whose memory is the host's and whose kernels are the CPU's, behind asynchronous streams.
//
// A kernel runs on the host when it is launched, and occupies its stream in virtual time: `slowness` times the host's CPU time, or
// `kernel_seconds`. Whatever waits for the device (a copy back, `.item()`, synchronise) waits for that time: it sleeps or, with `manual`,
// sets the clock forward. What is only sometimes wrong on a device always fails here: every stream has a vector clock, and a kernel that
// touches memory of another stream's kernel without having waited for it raises; so does memory that is given out again while another
// stream still uses it, and an event whose time is read before it has happened.
//
// Written from torch's headers and its documentation of accelerator integration.

#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include <unistd.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kOurs = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
using Seen = std::map<int, uint64_t>;  // of every stream, up to which of its kernels

// -- settings, clock, streams ------------------------------------------------------------------------------------------------------------

struct Settings {
  double devices = 2, slowness = 1, kernel_seconds = 0, queue = 1024, memory = 4e9, lost_after = 0, manual = 0;
} settings;
std::recursive_mutex mutex;
double manual_now = 0;
const char* lost_with = nullptr;  // the file with whose appearance the device is lost
uint64_t kernels = 0, waits = 0;
Seen host;  // what the host has waited for

double* setting(const std::string& name) {
  const std::map<std::string, double*> known{
      {"devices", &settings.devices}, {"slowness", &settings.slowness}, {"kernel_seconds", &settings.kernel_seconds},
      {"queue", &settings.queue},     {"memory", &settings.memory},     {"lost_after", &settings.lost_after},
      {"manual", &settings.manual},   {"now", &manual_now}};
  return known.count(name) ? known.at(name) : nullptr;
}

void configured() {  // by the environment, EMULATED_DEVICES=4; once in every process, forked ones among them
  static pid_t process = 0;
  if (process == getpid()) return;
  process = getpid();
  for (const char* name : {"devices", "slowness", "kernel_seconds", "queue", "memory", "lost_after", "manual"}) {
    std::string variable = std::string("EMULATED_") + name;
    for (char& letter : variable) letter = static_cast<char>(toupper(letter));
    if (const char* text = getenv(variable.c_str())) *setting(name) = atof(text);
  }
  lost_with = getenv("EMULATED_LOST_WITH");
}

double now() {
  if (settings.manual) return manual_now;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double busy() {  // CPU seconds of this thread: what others do to the machine does not make a kernel longer
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void wait_until(double time) {  // never called with the mutex held by a kernel of another thread for long: waiting is all it does
  if (settings.manual) {
    manual_now = std::max(manual_now, time);
  } else if (const double left = time - now(); left > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }
}

void merge(Seen& into, const Seen& from) {
  for (auto [stream, kernel] : from) into[stream] = std::max(into[stream], kernel);
}

struct Queue {  // of a stream
  double end = 0;  // of all kernels launched so far
  std::deque<double> ends;
  Seen seen;
};
std::map<std::pair<DeviceIndex, c10::StreamId>, std::pair<int, Queue>> queues;
std::vector<c10::StreamId> newest;
thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, c10::StreamId> current_streams;

DeviceIndex count() {
  configured();
  return static_cast<DeviceIndex>(settings.devices);
}

void check_alive(const char* what) {
  configured();
  if ((settings.lost_after && kernels >= settings.lost_after) || (lost_with && !access(lost_with, F_OK)))
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 719, std::string("emulated device lost, in ") + what);
}

std::pair<int, Queue>& queue_of(Stream stream) {
  auto [found, made] = queues.try_emplace({stream.device_index(), stream.id()});
  if (made) found->second.first = static_cast<int>(queues.size());
  return found->second;
}

Stream current_stream(DeviceIndex device) { return Stream(Stream::UNSAFE, Device(kOurs, device), current_streams[device]); }

void synchronize(Stream stream) {
  double end;
  {
    std::lock_guard lock(mutex);
    check_alive("synchronize");
    waits++;
    end = queue_of(stream).second.end;
    merge(host, queue_of(stream).second.seen);
  }
  wait_until(end);
}

// -- memory ------------------------------------------------------------------------------------------------------------------------------

struct Use {
  uint64_t kernel;
  double end;
};

struct Block {
  void* ptr;
  size_t size;
  DeviceIndex device;
  int stream;  // for which it was allocated
  at::DataPtr owner;  // of a result that a CPU kernel has allocated
  std::map<int, Use> reads, writes;
  std::set<int> recorded;
};

void ordered(const Seen& seen, int stream, const std::map<int, Use>& uses, const char* what, const std::string& kernel) {
  for (const auto& [other, use] : uses) {
    const auto known = seen.find(other);
    TORCH_CHECK(
        other == stream || (known != seen.end() && known->second >= use.kernel),
        "race: ", kernel, " on stream ", stream, " does not wait for what stream ", other, " ", what);
  }
}

struct Memory final : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats[64];
  std::multimap<std::tuple<DeviceIndex, int, size_t>, Block*> cache;

  c10::CachingAllocator::Stat& allocated(DeviceIndex device) { return stats[device].allocated_bytes[0]; }
  c10::CachingAllocator::Stat& reserved(DeviceIndex device) { return stats[device].reserved_bytes[0]; }

  Block* take(size_t size) {
    std::lock_guard lock(mutex);
    check_alive("an allocation");
    auto& [stream, queue] = queue_of(current_stream(current));
    Block* block = nullptr;
    const auto [first, last] = cache.equal_range({current, stream, size});
    for (auto at = first; at != last && !block; ++at) {
      auto& uses = at->second->reads;
      const double time = now();
      const auto busy = [&](int other) { return uses.count(other) && uses.at(other).end > time; };
      if (std::any_of(at->second->recorded.begin(), at->second->recorded.end(), busy)) continue;
      block = at->second;
      for (int other : block->recorded) uses.erase(other), block->writes.erase(other);
      cache.erase(at);
      ordered(queue.seen, stream, uses, "still reads", "memory given out again");
      ordered(queue.seen, stream, block->writes, "still writes", "memory given out again");
      break;
    }
    if (!block) {
      if (size + reserved(current).current > settings.memory) emptyCache();
      TORCH_CHECK_WITH(
          OutOfMemoryError, size + reserved(current).current <= settings.memory, "emulated device out of memory: tried to allocate ", size,
          " bytes of ", static_cast<size_t>(settings.memory), ", ", reserved(current).current, " are in use");
      block = new Block{aligned_alloc(64, size), size, current, stream};
      reserved(current).increase(size);
    }
    block->reads.clear(), block->writes.clear(), block->recorded.clear();
    allocated(current).increase(size);
    return block;
  }

  Block* adopt(at::DataPtr owner, size_t size, DeviceIndex device, int stream) {
    std::lock_guard lock(mutex);
    auto* block = new Block{owner.get(), size, device, stream, std::move(owner)};
    allocated(device).increase(size), reserved(device).increase(size);
    return block;
  }

  static void give_back(void* context);

  at::DataPtr allocate(size_t wanted) override {
    const size_t size = (wanted + 511) / 512 * 512;
    if (!size) return {nullptr, nullptr, &give_back, Device(kOurs, current)};
    auto* block = take(size);
    return {block->ptr, block, &give_back, Device(kOurs, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard lock(mutex);
    for (auto& [key, block] : cache) {
      reserved(block->device).decrease(block->size);
      free(block->ptr);
      delete block;
    }
    cache.clear();
  }
  void recordStream(const at::DataPtr& data, Stream stream) override {
    std::lock_guard lock(mutex);
    if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(queue_of(stream).first);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(DeviceIndex device) override { allocated(device).reset_accumulated(), reserved(device).reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { allocated(device).reset_peak(), reserved(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto all = static_cast<size_t>(settings.memory);
    return {all - std::min<size_t>(all, reserved(device).current), all};
  }
} memory;

void Memory::give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  std::lock_guard lock(mutex);
  memory.allocated(block->device).decrease(block->size);
  if (block->owner) {
    memory.reserved(block->device).decrease(block->size);
    delete block;
  } else {
    memory.cache.insert({{block->device, block->stream, block->size}, block});
  }
}

std::map<char*, size_t> pinned;
struct Pinned final : c10::Allocator {
  static void release(void* ptr) {
    std::lock_guard lock(mutex);
    pinned.erase(static_cast<char*>(ptr));
    free(ptr);
  }
  at::DataPtr allocate(size_t size) override {
    std::lock_guard lock(mutex);
    void* ptr = aligned_alloc(64, (size + 64) / 64 * 64);
    pinned[static_cast<char*>(ptr)] = size;
    return {ptr, ptr, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard lock(mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  return after != pinned.begin() && static_cast<const char*>(data) < std::prev(after)->first + std::max<size_t>(std::prev(after)->second, 1);
}

// -- events, guard -----------------------------------------------------------------------------------------------------------------------

struct Event {
  double time = 0;
  bool timed = false;
  Seen seen;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kOurs; }
  Device exchangeDevice(Device device) const override {
    const Device before(kOurs, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kOurs, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < count(), "emulated: no device ", int(device.index()), ", there are ", int(count()));
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return current_stream(device.has_index() ? device.index() : current); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    std::lock_guard lock(mutex);
    const DeviceIndex index = device.has_index() ? device.index() : current;
    newest.resize(64);
    return Stream(Stream::UNSAFE, Device(kOurs, index), ++newest[index]);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    std::lock_guard lock(mutex);
    check_alive("an event");
    auto* made = *event ? static_cast<Event*>(*event) : new Event();
    auto& queue = queue_of(stream).second;
    made->time = std::max(now(), queue.end), made->timed = flag == c10::EventFlag::BACKEND_DEFAULT, made->seen = queue.seen;
    *event = made;
  }
  void block(void* event, const Stream& stream) const override {
    std::lock_guard lock(mutex);
    if (!event) return;
    auto& queue = queue_of(stream).second;
    queue.end = std::max(queue.end, static_cast<Event*>(event)->time);
    merge(queue.seen, static_cast<Event*>(event)->seen);
  }
  bool queryEvent(void* event) const override { return !event || now() >= static_cast<Event*>(event)->time; }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    {
      std::lock_guard lock(mutex);
      check_alive("waiting for an event");
      waits++;
      merge(host, static_cast<Event*>(event)->seen);
    }
    wait_until(static_cast<Event*>(event)->time);
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(last);
    TORCH_CHECK(a && b && a->timed && b->timed, "emulated: an event without a time");
    TORCH_CHECK(queryEvent(a) && queryEvent(b), "race: the time of an event is read before it has happened");
    return (b->time - a->time) * 1e3;
  }
  bool queryStream(const Stream& stream) const override {
    std::lock_guard lock(mutex);
    return now() >= queue_of(stream).second.end;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<Stream> all{Stream(Stream::DEFAULT, Device(kOurs, device))};
    {
      std::lock_guard lock(mutex);
      for (const auto& [key, queue] : queues)
        if (key.first == device) all.emplace_back(Stream::UNSAFE, Device(kOurs, device), key.second);
    }
    for (auto stream : all) synchronize(stream);
  }
  void recordDataPtrOnStream(const at::DataPtr& data, const Stream& stream) const override { memory.recordStream(data, stream); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers, hooks ---------------------------------------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {  // the CPU's generator, on our device
  at::Generator cpu = at::detail::createCPUGenerator();
  explicit Random(DeviceIndex index) : GeneratorImpl(Device(kOurs, index), c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "emulated: no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "emulated: no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

at::Generator& default_random(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < 64; i++) made.push_back(at::make_generator<Random>(i));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_random(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Random>(index < 0 ? current : index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({kOurs, index}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return Guard().exchangeDevice({kOurs, index}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return index < 0 ? current : exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(size);
    if (size && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

}  // namespace
