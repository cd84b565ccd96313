/* Memory of calls of a library (heap.c). */
#ifndef LOWERING_HEAP_H
#define LOWERING_HEAP_H

#include "tasks.h"

extern LOWERING_HIDDEN const lowering_memory lowering_heap;
LOWERING_HIDDEN void lowering_release(void* memory);

#endif
