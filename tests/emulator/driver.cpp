// As much of libcuda as a launch touches, without a GPU: it answers, and writes down what it was asked for. The call
// from Python to the driver can thus be tested; see tests/unit/test_cuda_launch.py.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {
char told[1 << 16] = "";
size_t n_told = 0;
int n_parameters = 0;

template <class... A>
int tell(const char* format, A... values) {
  n_told += snprintf(told + n_told, sizeof told - n_told, format, values...);
  return 0;
}

template <class T>
int give(T* place, T value) {
  *place = value;
  return 0;
}

void* const LIBRARY = reinterpret_cast<void*>(0x11b0);
void* const CONTEXT = reinterpret_cast<void*>(0xc0e0);

// The first fields of CUlaunchConfig.
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
};
}  // namespace

extern "C" {
// For the test: how many parameters kernels have, and what was told since the last call.
void fake_expect(int n) { n_parameters = n; }
const char* fake_told() {
  static char last[sizeof told];
  memcpy(last, told, sizeof told);
  told[0] = 0;
  n_told = 0;
  return last;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return give(version, 13000); }
int cuDeviceGetCount(int* n) { return give(n, 1); }
int cuDeviceGet(int* device, int index) { return give(device, index); }
int cuDevicePrimaryCtxRetain(void** context, int) { return give(context, CONTEXT); }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  return give(active, 1);
}
int cuCtxGetCurrent(void** context) { return give(context, CONTEXT); }
int cuCtxSetCurrent(void* context) { return tell("current %d\n", context == CONTEXT); }
int cuCtxGetDevice(int* device) { return give(device, 0); }
int cuStreamGetCtx(void*, void** context) { return give(context, CONTEXT); }
int cuStreamGetCtx_v2(void*, void** context, void** green) {
  *green = nullptr;
  return give(context, CONTEXT);
}
int cuStreamGetDevice(void*, int* device) { return give(device, 0); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return give(value, attribute == 97 ? 232448 : attribute == 75 ? 9 : 0);
}
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  tell("load %d\n", memcmp(code, "\x7f" "ELF", 4) == 0);
  return give(library, LIBRARY);
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  tell("kernel %s %d\n", name, library == LIBRARY);
  return give(kernel, reinterpret_cast<void*>(0x1000 + strlen(name)));
}
int cuKernelGetLibrary(void** library, void*) { return give(library, LIBRARY); }
int cuKernelGetAttribute(int* value, int attribute, void*, int) { return give(value, attribute == 1 ? 448 : 0); }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  return tell("set %d %d %d %d\n", attribute, value, kernel != nullptr, device);
}
int cuLaunchKernelEx(const void* given, void* kernel, void** parameters, void**) {
  Config config;
  memcpy(&config, given, sizeof config);
  tell("launch %d grid %u %u %u block %u %u %u shared %u stream %llx with", kernel != nullptr, config.grid[0],
       config.grid[1], config.grid[2], config.block[0], config.block[1], config.block[2], config.shared,
       static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(config.stream)));
  for (int i = 0; i < n_parameters; ++i) {
    uint32_t low;
    memcpy(&low, parameters[i], 4);
    tell(" %x", low);
  }
  return tell("\n");
}
int cuGetErrorName(int, const char** name) { return give(name, "FAKE"); }
int cuGetErrorString(int, const char** name) { return give(name, "what the fake driver does not know"); }

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* here = dlsym(self, second);
  *function = here != nullptr ? here : dlsym(self, name);
  if (found != nullptr) *found = *function == nullptr;
  return *function == nullptr ? 500 : 0;
}
}
