/* Chunks: a job, cut into parts that any thread may do, in any order, and how each is done. Knows no thread. */
#ifndef ARROWCACHE_CHUNKS_H
#define ARROWCACHE_CHUNKS_H

#include "engine.h"

enum { CANCELLED = -1 }; /* as `damaged`: or refused */

/* Check a job and cut it into chunks. Returns: -1, or the index of an id that is out of range. */
int64_t chunks_prepare(engine_job *);

/* Do a chunk of a job; no two threads do the same one. */
void chunks_run(engine_job *, int64_t chunk);

/* End a job, all of whose chunks are done. Idempotent: a waiter that was interrupted may come again. */
void chunks_finish(engine_job *);

#endif
