#include "streams.h"

#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace emulation {
namespace {

enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };

using Graph = std::vector<Node>;

struct Capture {
  Graph graph;
  Mode mode;
  std::thread::id thread;
  bool valid = true;
};

struct Stream {
  bool blocking;
  std::unique_ptr<Capture> capture;
};

std::recursive_mutex mutex;
std::set<void*> graphs, executables;       // Graph*
std::set<Stream*> streams;

using Lock = std::lock_guard<std::recursive_mutex>;

// Null for the default streams, of this thread (1, 2) too.
Stream* stream_of(void* handle) { return streams.count((Stream*)handle) ? (Stream*)handle : nullptr; }
bool is_default(void* handle) { return (size_t)handle <= 2; }

CUresult refuse_handle(const char* call, const char* what) {
  return refuse_call(CUDA_ERROR_INVALID_HANDLE, call, what);
}

template <class F>
CUresult end_all(const char* call, CUresult code, const char* why, F which) {
  CUresult result = CUDA_SUCCESS;
  for (Stream* stream : streams)
    if (stream->capture && which(*stream)) {
      stream->capture->valid = false;
      result = refuse_call(code, call, why);
    }
  return result;
}

}  // namespace

void* make_stream(bool blocking) {
  Lock lock(mutex);
  auto stream = new Stream{blocking, nullptr};
  streams.insert(stream);
  return stream;
}

CUresult destroy_stream(void* handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (!stream) return refuse_handle("cudaStreamDestroy", "no stream");
  streams.erase(stream);
  delete stream;
  return CUDA_SUCCESS;
}

bool captures(void* handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  return stream && stream->capture;
}

CUresult refuse_capture(CUresult code, const char* call, void* handle, const char* why) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  if (stream && stream->capture) stream->capture->valid = false;
  return refuse_call(code, call, why);
}

CUresult enqueue(const char* call, void* handle, Node work) {
  Lock lock(mutex);
  if (is_default(handle)) {
    CUresult refused = end_all(call, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream would wait for one that captures",
                               [](Stream& stream) { return stream.blocking; });
    return refused ? refused : work();
  }
  Stream* stream = stream_of(handle);
  if (!stream) return refuse_handle(call, "no stream");
  if (!stream->capture) return work();
  if (!stream->capture->valid) return refuse_call(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, call, "the capture has failed before");
  stream->capture->graph.push_back(std::move(work));
  return CUDA_SUCCESS;
}

CUresult check_unsafe(const char* call) {
  Lock lock(mutex);
  return end_all(call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted while a stream captures", [](Stream& stream) {
    auto& capture = *stream.capture;
    return capture.mode == GLOBAL || (capture.mode == THREAD_LOCAL && capture.thread == std::this_thread::get_id());
  });
}

CUresult check_wait(const char* call, void* handle) {
  Lock lock(mutex);
  if (captures(handle))
    return refuse_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, call, handle, "the stream captures: it does no work to wait for");
  return enqueue(call, handle, [] { return CUDA_SUCCESS; });
}

CUresult begin_capture(void* handle, int mode) {
  constexpr auto call = "cudaStreamBeginCapture";
  Lock lock(mutex);
  if (is_default(handle)) return refuse_call(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, call, "the default stream cannot capture");
  Stream* stream = stream_of(handle);
  if (!stream) return refuse_handle(call, "no stream");
  if (stream->capture) return refuse_call(CUDA_ERROR_ILLEGAL_STATE, call, "the stream captures already");
  if (mode < GLOBAL || mode > RELAXED) return refuse_call(CUDA_ERROR_INVALID_VALUE, call, "unknown mode");
  stream->capture.reset(new Capture{{}, (Mode)mode, std::this_thread::get_id()});
  return CUDA_SUCCESS;
}

CUresult end_capture(void* handle, void** graph) {
  constexpr auto call = "cudaStreamEndCapture";
  Lock lock(mutex);
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  if (!stream || !stream->capture) return refuse_call(CUDA_ERROR_ILLEGAL_STATE, call, "the stream does not capture");
  if (stream->capture->mode != RELAXED && stream->capture->thread != std::this_thread::get_id())
    return refuse_call(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, call, "another thread began the capture");
  auto capture = std::move(stream->capture);
  if (!capture->valid) return refuse_call(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, call, "the capture has failed before");
  graphs.insert(*graph = new Graph(std::move(capture->graph)));
  return CUDA_SUCCESS;
}

CUresult instantiate(void** executable, void* graph) {
  Lock lock(mutex);
  if (!graphs.count(graph)) return refuse_handle("cudaGraphInstantiate", "no graph");
  executables.insert(*executable = new Graph(*(Graph*)graph));
  return CUDA_SUCCESS;
}

CUresult launch_graph(void* executable, void* stream) {
  constexpr auto call = "cudaGraphLaunch";
  Lock lock(mutex);
  if (!executables.count(executable)) return refuse_handle(call, "no executable graph");
  if (captures(stream)) return refuse_capture(CUDA_ERROR_NOT_SUPPORTED, call, stream, "graphs in graphs are not emulated");
  return enqueue(call, stream, [executable] {
    for (auto& node : *(Graph*)executable)
      if (CUresult failed = node()) return failed;
    return CUDA_SUCCESS;
  });
}

CUresult destroy_graph(void* graph) {
  Lock lock(mutex);
  if (!graphs.erase(graph)) return refuse_handle("cudaGraphDestroy", "no graph");
  delete (Graph*)graph;
  return CUDA_SUCCESS;
}

CUresult destroy_executable(void* executable) {
  Lock lock(mutex);
  if (!executables.erase(executable)) return refuse_handle("cudaGraphExecDestroy", "no executable graph");
  delete (Graph*)executable;
  return CUDA_SUCCESS;
}

}  // namespace emulation
