// Streams, and graphs that are captured from them (CUDA C++ Programming Guide, Creating a Graph Using Stream Capture).
// Work is done when it is enqueued, so that all a stream knows is whether it captures.
#pragma once
#include <functional>

#include "driver.h"

namespace emulation {

// One work item: a kernel with its parameters as they were, or a copy. Done again at each launch of the graph.
using Node = std::function<CUresult()>;

void* make_stream(bool blocking);
CUresult destroy_stream(void* stream);

// Does the work, or adds it to the graph that the stream captures. The default stream would wait for blocking streams: used
// while one of them captures, it is refused and ends the capture.
CUresult enqueue(const char* call, void* stream, Node work);
// Whether the stream captures.
bool captures(void* stream);
// Before calls that cannot be captured, but would act at once on something that may be in use: refused in every thread while
// a stream captures in global mode, in the thread that began while one captures in thread-local mode; they end the capture.
CUresult check_unsafe(const char* call);
// Before waiting for a stream, which a capture forbids.
CUresult check_wait(const char* call, void* stream);
// Refuses a call, and ends the capture of a stream if it has one.
CUresult refuse_capture(CUresult code, const char* call, void* stream, const char* why);

CUresult begin_capture(void* stream, int mode);
CUresult end_capture(void* stream, void** graph);
CUresult instantiate(void** executable, void* graph);
CUresult launch_graph(void* executable, void* stream);
CUresult destroy_graph(void* graph);
CUresult destroy_executable(void* executable);

}  // namespace emulation
