/* Stubs of the functions that libtvm_runtime_cuda.so imports from the driver (-DDRIVER) and from CUDA's runtime. They
 * always fail: a machine that only builds must be able to load the library, and nothing more. In both, 100 means "no
 * device". */
#define REFUSED(name) \
  int name(void) { return 100; }

#ifdef DRIVER
REFUSED(cuDeviceGetName)
REFUSED(cuFuncSetAttribute)
REFUSED(cuInit)
REFUSED(cuLaunchKernelEx)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleUnload)
REFUSED(cuTensorMapEncodeTiled)
int cuGetErrorName(int code, const char** text) { return *text = "CUDA_ERROR_NO_DEVICE", 0; }
int cuGetErrorString(int code, const char** text) { return *text = "no CUDA-capable device is detected", 0; }
#else
REFUSED(cudaDeviceGetAttribute)
REFUSED(cudaEventCreate)
REFUSED(cudaEventDestroy)
REFUSED(cudaEventElapsedTime)
REFUSED(cudaEventRecord)
REFUSED(cudaEventSynchronize)
REFUSED(cudaFree)
REFUSED(cudaFreeHost)
REFUSED(cudaGetDevice)
REFUSED(cudaGetDeviceCount)
REFUSED(cudaGetDeviceProperties)
REFUSED(cudaGetLastError)
REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy)
REFUSED(cudaGraphInstantiate)
REFUSED(cudaGraphLaunch)
REFUSED(cudaMalloc)
REFUSED(cudaMallocHost)
REFUSED(cudaMemGetInfo)
REFUSED(cudaMemcpyAsync)
REFUSED(cudaMemcpyPeerAsync)
REFUSED(cudaPeekAtLastError)
REFUSED(cudaSetDevice)
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamCreate)
REFUSED(cudaStreamCreateWithFlags)
REFUSED(cudaStreamDestroy)
REFUSED(cudaStreamEndCapture)
REFUSED(cudaStreamSynchronize)
REFUSED(cudaStreamWaitEvent)
const char* cudaGetErrorName(void) { return "cudaErrorNoDevice"; }
const char* cudaGetErrorString(void) { return "no CUDA-capable device is detected"; }
#endif
