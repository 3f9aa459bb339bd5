// A CUDA runtime for machines without a GPU, preloaded in front of the real one. Device memory is
// host memory. It has no kernels: `emulated.py` computes each operation, and a launch that reaches
// this file is an error. What may be in the way of the host is counted; see ordering.h for races.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "ordering.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

using emulated::Event;
using emulated::Name;
using Guard = std::lock_guard<std::recursive_mutex>;

struct Block {
  std::size_t size;
  cudaMemoryType type;
  int device;
};

emulated::Order& order = *new emulated::Order;  // never destroyed: threads outlive `main`
std::map<const char*, Block>& blocks = *new std::map<const char*, Block>;
std::intptr_t next_stream = 1 << 12;
thread_local int device_now = 0;
thread_local long site_now = -1;
thread_local cudaError_t last_error = cudaSuccess;
void (*on_wait)(const char*) = nullptr;  // calls Python, so never under the lock

int physical(int device) {  // by CUDA_VISIBLE_DEVICES; -1: there is none
  const char* all = std::getenv("EMULATED_GPUS");
  const int count = all ? std::atoi(all) : 1;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return device < count ? device : -1;
  for (int place = 0; *text; ++place) {
    char* end;
    const long number = std::strtol(text, &end, 10);
    if (end == text || number < 0 || number >= count) return -1;
    if (place == device) return static_cast<int>(number);
    text = *end == ',' ? end + 1 : end;
  }
  return -1;
}

Name name_of(cudaStream_t stream) {
  return stream ? reinterpret_cast<Name>(stream) : -1 - static_cast<Name>(device_now);
}

Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

void tell(const char* what) {
  if (on_wait) on_wait(what);
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

const Block* block_of(const void* place) {
  const char* at = static_cast<const char*>(place);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  auto found = std::prev(next);
  return at < found->first + found->second.size ? &found->second : nullptr;
}

cudaError_t allocate(void** place, std::size_t size, cudaMemoryType type) {
  const std::size_t whole = (size + 511) / 512 * 512;
  if (posix_memalign(place, 512, whole ? whole : 512)) return fail(cudaErrorMemoryAllocation);
  std::memset(*place, 0xff, whole);  // what is read before it is written is not a number
  Guard guard(order.lock);
  blocks[static_cast<char*>(*place)] = {whole, type, device_now};
  return cudaSuccess;
}

cudaError_t release(void* place) {
  if (!place) return cudaSuccess;
  {
    Guard guard(order.lock);
    order.host_waits_for_all();
    auto found = blocks.find(static_cast<char*>(place));
    if (found != blocks.end()) {
      order.forget(place, found->second.size);
      blocks.erase(found);
    }
  }
  std::free(place);
  return cudaSuccess;
}

cudaError_t copy_now(void* to, const void* from, std::size_t size, cudaStream_t stream) {
  const bool same = to == from || !size;
  bool pageable = false;
  {
    Guard guard(order.lock);
    const Block *target = block_of(to), *source = block_of(from);
    const bool on_device = target && target->type == cudaMemoryTypeDevice;
    const bool from_device = source && source->type == cudaMemoryTypeDevice;
    const Name name = name_of(stream);
    pageable = !target || !source;
    if (!pageable && on_device != from_device && !same) {
      order.issue_late(name, to, from, size, !on_device);
    } else {
      order.issue(name);
      std::memmove(to, from, size);
    }
    if (from_device) order.access(name, from, size, false, site_now);
    if (on_device) order.access(name, to, size, true, site_now);
  }
  if (pageable && !same) tell("pageable");
  return cudaSuccess;
}

}  // namespace

// ---------------------------------------------------------------- for emulated.py

API void emulated_on_wait(void (*function)(const char*)) { on_wait = function; }
API void emulated_site(long site) { site_now = site; }
API void emulated_launch(cudaStream_t stream) {
  Guard guard(order.lock);
  order.issue(name_of(stream));
}
API void emulated_access(cudaStream_t stream, const void* place, std::size_t size, int writes) {
  Guard guard(order.lock);
  order.access(name_of(stream), place, size, writes, site_now);
}
API const char* emulated_next_race(long* site, long* other) {
  Guard guard(order.lock);
  if (order.races.empty()) return nullptr;
  auto race = order.races.front();
  order.races.pop_front();
  *site = race.site, *other = race.other;
  return race.kind;
}

// ---------------------------------------------------------------- devices

API cudaError_t cudaGetDeviceCount(int* count) {
  for (*count = 0; physical(*count) >= 0;) ++*count;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) { return *device = device_now, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || physical(device) < 0) return fail(cudaErrorInvalidDevice);
  return device_now = device, cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int device) {
  if (physical(device) < 0) return fail(cudaErrorInvalidDevice);
  std::memset(all, 0, sizeof *all);
  std::snprintf(all->name, sizeof all->name, "Emulated H100 on a CPU");
  all->totalGlobalMem = std::size_t{80} << 30;
  all->major = 9;
  all->pciBusID = physical(device);
  all->multiProcessorCount = 132;
  all->warpSize = 32;
  all->maxThreadsPerBlock = all->maxThreadsDim[0] = all->maxThreadsDim[1] = 1024;
  all->maxThreadsDim[2] = 64;
  all->maxThreadsPerMultiProcessor = 2048;
  all->maxGridSize[0] = INT32_MAX;
  all->maxGridSize[1] = all->maxGridSize[2] = 65535;
  all->regsPerBlock = all->regsPerMultiprocessor = 65536;
  all->sharedMemPerBlock = 48 << 10;
  all->sharedMemPerBlockOptin = 227 << 10;
  all->sharedMemPerMultiprocessor = 228 << 10;
  all->l2CacheSize = 50 << 20;
  all->textureAlignment = 512;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp all;
  if (cudaGetDeviceProperties(&all, device)) return last_error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = all.warpSize; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 0; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "0000:%02X:00.0", physical(device));
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  return last_error = cudaSuccess, error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---------------------------------------------------------------- memory

API cudaError_t cudaMalloc(void** place, size_t size) {
  const char* most = std::getenv("EMULATED_GPU_BYTES");
  std::size_t used = size;
  Guard guard(order.lock);
  for (auto& [_, block] : blocks) {
    used += block.type == cudaMemoryTypeDevice && block.device == device_now ? block.size : 0;
  }
  if (used > (most ? std::strtoull(most, nullptr, 10) : std::size_t{80} << 30)) {
    return fail(cudaErrorMemoryAllocation);
  }
  return allocate(place, size, cudaMemoryTypeDevice);
}
API cudaError_t cudaFree(void* place) { return release(place); }
API cudaError_t cudaHostAlloc(void** place, size_t size, unsigned) {
  return allocate(place, size, cudaMemoryTypeHost);
}
API cudaError_t cudaMallocHost(void** place, size_t size) {
  return allocate(place, size, cudaMemoryTypeHost);
}
API cudaError_t cudaFreeHost(void* place) { return release(place); }
API cudaError_t cudaHostRegister(void* place, size_t size, unsigned) {
  Guard guard(order.lock);
  blocks[static_cast<char*>(place)] = {size, cudaMemoryTypeHost, device_now};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* place) {
  Guard guard(order.lock);
  order.host_waits_for_all();
  blocks.erase(static_cast<char*>(place));
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* place) {
  std::memset(found, 0, sizeof *found);
  Guard guard(order.lock);
  const Block* block = block_of(place);
  found->type = block ? block->type : cudaMemoryTypeUnregistered;
  found->device = block ? block->device : -2;
  found->hostPointer = const_cast<void*>(place);
  if (block) found->devicePointer = const_cast<void*>(place);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  *total = std::size_t{80} << 30;
  *unused = *total - (std::size_t{1} << 30);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy_now(to, from, size, stream);
}
API cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy_now(to, from, size, stream);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  copy_now(to, from, size, nullptr);
  return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemsetAsync(void* place, int value, size_t size, cudaStream_t stream) {
  Guard guard(order.lock);
  order.issue(name_of(stream));
  order.access(name_of(stream), place, size, true, site_now);
  std::memset(place, value, size);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* place, int value, size_t size) {
  return cudaMemsetAsync(place, value, size, nullptr);
}

// ---------------------------------------------------------------- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Guard guard(order.lock);
  next_stream += 16;
  return *stream = reinterpret_cast<cudaStream_t>(next_stream), cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  return *priority = 0, cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Guard guard(order.lock);
  order.host_waits(name_of(stream));
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  {
    Guard guard(order.lock);
    order.host_waits(name_of(stream));
  }
  return tell("stream"), cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  {
    Guard guard(order.lock);
    order.host_waits_for_all();
  }
  return tell("device"), cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Guard guard(order.lock);
  order.stream_waits(name_of(stream), event_of(event));
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  auto made = new Event;
  made->ms = now_ms();
  return *event = reinterpret_cast<cudaEvent_t>(made), cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete &event_of(event), cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Guard guard(order.lock);
  order.record(event_of(event), name_of(stream));
  event_of(event).ms = now_ms();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(order.lock);
  return order.is_done(event_of(event)) ? cudaSuccess : fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  {
    Guard guard(order.lock);
    order.host_waits(event_of(event));
  }
  return tell("event"), cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return *ms = static_cast<float>(event_of(end).ms - event_of(start).ms), cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* given) {
  emulated_launch(stream);
  return function(given), cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void* given, unsigned) {
  emulated_launch(stream);
  return function(stream, cudaSuccess, given), cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
// Its signature differs between versions; the first of what it returns is the status.
#undef cudaStreamGetCaptureInfo
#define CAPTURE_INFO(name)                                                              \
  API cudaError_t name##_emulated(cudaStream_t, cudaStreamCaptureStatus* status) {      \
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;                          \
  }                                                                                     \
  asm(".globl " #name "\n.set " #name ", " #name "_emulated");
CAPTURE_INFO(cudaStreamGetCaptureInfo)
CAPTURE_INFO(cudaStreamGetCaptureInfo_v2)
CAPTURE_INFO(cudaStreamGetCaptureInfo_v3)
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---------------------------------------------------------------- kernels: there are none

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNoKernelImageForDevice);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNoKernelImageForDevice);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return fail(cudaErrorNoKernelImageForDevice);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* all, const void*) {
  std::memset(all, 0, sizeof *all);
  all->maxThreadsPerBlock = 1024;
  all->binaryVersion = all->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// What torch asks of the driver, by name, is answered by the stub that building.py makes.
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned*, int*);
namespace {
int done(...) { return 0; }
int context_state(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  return *active = 1, 0;
}
}  // namespace
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  const bool state = !std::strcmp(name, "cuDevicePrimaryCtxGetState");
  *function = state ? reinterpret_cast<void*>(context_state) : reinterpret_cast<void*>(done);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
