/* See engine.h. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
    CHUNK_BYTES = 256 << 10,  /* some 20 microseconds of work; small beside what two threads would fight over */
    LENGTHS_A_CHUNK = 4096,
    BLOCK = 64,               /* rows that are looked up at a time */
    AHEAD = 8,                /* rows; the misses of their first lines overlap */
    LINE = 64, LINES = 4,
    ASKED_BYTES = 128 << 10,
    MOST_THREADS = 64,
    LOOK_NANOSECONDS = 50000, /* two chunks take less; to sleep and be woken costs as much */
    CANCELLED = -1, /* as `damaged`: or refused */
};

struct engine {
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work, ended;
    engine_job *head, *tail; /* jobs with chunks that nobody has begun */
    pthread_t threads[MOST_THREADS];
    bool has_ended[MOST_THREADS];
    int64_t running; /* threads that were started and not joined: the first of `threads` */
    bool is_stopping;
};

/* A row's file and its place in it. */
typedef struct {
    const engine_segment *segment;
    int64_t row;
} place;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Rows. */

static const engine_segment *segment_of(const engine_rows *rows, int64_t id)
{
    if (rows->rows_each)
        return rows->segments + (uint64_t)id / (uint64_t)rows->rows_each;
    int64_t block = id >> rows->block_shift, low = rows->blocks[block], high = rows->blocks[block + 1];
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (rows->segments[middle].first <= id)
            low = middle;
        else
            high = middle - 1;
    }
    return rows->segments + low;
}

static place place_of(const engine_rows *rows, int64_t id)
{
    const engine_segment *segment = segment_of(rows, id);
    return (place){segment, id - segment->first};
}

static int64_t outside(const engine_rows *rows, const int64_t *ids, int64_t count)
{
    uint64_t first = (uint64_t)__atomic_load_n(&rows->first, __ATOMIC_RELAXED); /* its owner may raise it meanwhile */
    uint64_t span = (uint64_t)rows->rows - first;
    for (int64_t i = 0; i < count; i++)
        if ((uint64_t)ids[i] - first >= span)
            return i;
    return -1;
}

PUBLIC int64_t engine_segments(const engine_rows *rows, const int64_t *ids, int64_t count, int64_t *segments)
{
    int64_t bad = outside(rows, ids, count);
    for (int64_t i = 0; bad < 0 && i < count; i++)
        segments[i] = segment_of(rows, ids[i]) - rows->segments;
    return bad;
}

/* Copying. */

static inline void copy(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    switch (nbytes) { /* a call of memcpy costs more than these */
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, (size_t)nbytes);
    }
}

static inline const uint8_t *row_at(place at, const engine_column *column)
{
    return at.segment->base + at.segment->at[column->buffer] + at.row * column->row_bytes;
}

static inline void prefetch(const uint8_t *row, int64_t nbytes)
{
    for (int64_t at = 0; at < least(nbytes, LINES * LINE); at += LINE)
        __builtin_prefetch(row + at);
}

static void copy_rows(const engine_job *job, int64_t first, int64_t last)
{
    place places[BLOCK + AHEAD];
    for (int64_t start = first; start < last; start += BLOCK) {
        int64_t count = least(BLOCK, last - start), known = least(BLOCK + AHEAD, last - start);
        for (int64_t i = 0; i < known; i++)
            places[i] = place_of(job->rows, job->ids[start + i]);
        for (const engine_column *column = job->columns; column < job->columns + job->column_count; column++) {
            int64_t width = column->row_bytes;
            uint8_t *out = column->out + start * width;
            for (int64_t i = 0; start == first && i < least(AHEAD, known); i++)
                prefetch(row_at(places[i], column), width);
            for (int64_t i = 0; i < count; i++, out += width) {
                if (i + AHEAD < known)
                    prefetch(row_at(places[i + AHEAD], column), width);
                copy(out, row_at(places[i], column), width);
            }
        }
    }
}

/* Bytes `from` to `to` of a row, its columns one behind another. */
static void copy_part(const engine_job *job, int64_t index, int64_t from, int64_t to)
{
    place at = place_of(job->rows, job->ids[index]);
    for (const engine_column *column = job->columns; to > 0; column++) {
        int64_t width = column->row_bytes, stop = least(to, width);
        if (from < stop)
            copy(column->out + index * width + from, row_at(at, column) + from, stop - from);
        from = from > width ? from - width : 0;
        to -= width;
    }
}

static void find_values(engine_job *job, int64_t first, int64_t last)
{
    int64_t buffer = job->columns[0].buffer, width = job->columns[0].row_bytes;
    place places[AHEAD];
    for (int64_t i = first - AHEAD; i < last; i++) {
        int64_t coming = i + AHEAD;
        place at = {0};
        if (i >= first)
            at = places[i % AHEAD];
        if (coming < last) {
            place there = places[coming % AHEAD] = place_of(job->rows, job->ids[coming]);
            __builtin_prefetch(there.segment->base + there.segment->at[buffer] + there.row * 4);
        }
        if (i < first)
            continue;
        int32_t ends[2];
        memcpy(ends, at.segment->base + at.segment->at[buffer] + at.row * 4, sizeof ends);
        int64_t values = at.segment->at[buffer + 1];
        if (ends[0] < 0 || ends[1] < ends[0] || values + ends[1] * width > at.segment->nbytes) {
            int64_t none = 0; /* a cancellation stays */
            __atomic_compare_exchange_n(&job->damaged, &none, i + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
            ends[0] = ends[1] = 0;
        }
        job->from[i] = at.segment->base + values + ends[0] * width;
        job->to[i + 1] = (ends[1] - ends[0]) * width;
    }
}

static void copy_values(const engine_job *job, int64_t from, int64_t to)
{
    int64_t low = 0, high = job->count - 1; /* the value that byte `from` is in */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (job->to[middle] <= from)
            low = middle;
        else
            high = middle - 1;
    }
    uint8_t *out = job->columns[0].out;
    for (int64_t i = low; from < to; i++) {
        if (i + AHEAD < job->count)
            prefetch(job->from[i + AHEAD], job->to[i + AHEAD + 1] - job->to[i + AHEAD]);
        int64_t stop = least(job->to[i + 1], to);
        if (from < stop)
            copy(out + from, job->from[i] + (from - job->to[i]), stop - from);
        from = from < stop ? stop : from;
    }
}

PUBLIC void engine_ask(const engine_job *job)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    for (int64_t i = 0; i < job->count; i++) {
        if (outside(job->rows, job->ids + i, 1) >= 0)
            continue;
        place at = place_of(job->rows, job->ids[i]);
        for (const engine_column *column = job->columns; at.segment->base && column < job->columns + job->column_count; column++) {
            uintptr_t start = (uintptr_t)row_at(at, column), end = start + (uintptr_t)column->row_bytes;
            start -= start % (uintptr_t)page;
            for (; start < end; start += ASKED_BYTES) /* more at a time is cut short, in silence */
                madvise((void *)start, (size_t)least((int64_t)(end - start), ASKED_BYTES), MADV_WILLNEED);
        }
    }
}

PUBLIC int64_t engine_is_warm(const engine_job *job)
{
    if (outside(job->rows, job->ids, job->count) >= 0)
        return 0;
    for (int64_t i = 0; i < job->count; i++) {
        const uint8_t *warm = segment_of(job->rows, job->ids[i])->warm;
        if (!warm || !*warm)
            return 0;
    }
    return 1;
}

/* Jobs. */

static int64_t bytes_of_row(const engine_job *job)
{
    int64_t nbytes = 0;
    for (int64_t i = 0; i < job->column_count; i++)
        nbytes += job->columns[i].row_bytes;
    return nbytes;
}

/* Check a job and cut it into chunks. */
static int64_t prepare(engine_job *job)
{
    int64_t whole = job->count, bad = -1;
    job->parts = 1;
    job->begun = 0;
    if (job->kind == ENGINE_VALUES) {
        whole = job->count ? job->to[job->count] : 0;
        job->unit = CHUNK_BYTES;
    } else {
        int64_t nbytes = bytes_of_row(job);
        bad = outside(job->rows, job->ids, job->count);
        for (int64_t i = 0; bad < 0 && i < job->count; i++)
            if (!segment_of(job->rows, job->ids[i])->base)
                bad = i;
        job->unit = LENGTHS_A_CHUNK;
        if (job->kind == ENGINE_FIXED) {
            job->unit = nbytes > CHUNK_BYTES || !nbytes ? 1 : CHUNK_BYTES / nbytes;
            job->parts = nbytes > CHUNK_BYTES ? (nbytes + CHUNK_BYTES - 1) / CHUNK_BYTES : 1;
            whole = nbytes ? whole : 0;
        }
    }
    job->damaged = bad < 0 ? 0 : CANCELLED;
    job->faults = 0;
    job->chunks = bad < 0 ? (whole + job->unit - 1) / job->unit * job->parts : 0;
    __atomic_store_n(&job->left, (uint32_t)job->chunks, __ATOMIC_RELAXED);
    return bad;
}

static int64_t faults_so_far(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_majflt;
}

static void run_chunk(engine_job *job, int64_t chunk)
{
    int64_t before = faults_so_far(), start = chunk / job->parts * job->unit;
    if (job->kind == ENGINE_VALUES)
        copy_values(job, start, least(start + job->unit, job->to[job->count]));
    else if (job->kind == ENGINE_LENGTHS)
        find_values(job, start, least(start + job->unit, job->count));
    else if (job->parts == 1)
        copy_rows(job, start, least(start + job->unit, job->count));
    else {
        int64_t nbytes = bytes_of_row(job), from = chunk % job->parts * CHUNK_BYTES;
        copy_part(job, start, from, least(from + CHUNK_BYTES, nbytes));
    }
    int64_t faults = faults_so_far() - before;
    if (faults)
        __atomic_fetch_add(&job->faults, faults, __ATOMIC_RELAXED);
}

/* What is done once, when all chunks are: a waiter that was interrupted may come again. */
static void finish(engine_job *job)
{
    if (job->kind != ENGINE_LENGTHS || job->damaged == CANCELLED || !job->unit)
        return;
    job->unit = 0;
    job->to[0] = 0;
    for (int64_t i = 0; i < job->count; i++)
        job->to[i + 1] += job->to[i];
}

PUBLIC int64_t engine_copy(engine_job *job)
{
    int64_t bad = prepare(job);
    for (int64_t chunk = 0; chunk < job->chunks; chunk++)
        run_chunk(job, chunk);
    job->left = 0;
    finish(job);
    return bad;
}

/* The engine. */

/* Take a chunk of the first job, or of this one; under the lock. Returns: -1: there is none. */
static int64_t begin_chunk(engine *self, engine_job *job)
{
    if (!job || job->begun == job->chunks)
        return -1;
    if (job->begun + 1 == job->chunks) { /* nobody else is to look at it */
        engine_job **link = &self->head, *before = NULL;
        while (*link && *link != job) {
            before = *link;
            link = &before->following;
        }
        if (*link) {
            *link = job->following;
            if (self->tail == job)
                self->tail = before;
        }
    }
    return job->begun++;
}

/* After the last one the job may be gone, for a thread that is not its waiter's. */
static void end_chunk(engine_job *job)
{
    uint32_t *left = &job->left;
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
        syscall(SYS_futex, left, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *work(void *argument)
{
    engine *self = argument;
    pthread_t thread = pthread_self();
    pthread_mutex_lock(&self->lock);
    while (!self->is_stopping) {
        engine_job *job = self->head;
        int64_t chunk = begin_chunk(self, job);
        if (chunk < 0) {
            pthread_cond_wait(&self->work, &self->lock);
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        run_chunk(job, chunk);
        end_chunk(job);
        pthread_mutex_lock(&self->lock);
    }
    for (int64_t i = 0; i < self->running; i++)
        if (pthread_equal(self->threads[i], thread))
            self->has_ended[i] = true;
    pthread_cond_broadcast(&self->ended);
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

PUBLIC int64_t engine_version(void) { return ENGINE_VERSION; }

PUBLIC engine *engine_new(void)
{
    engine *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    pthread_cond_init(&self->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return self;
}

/* Join the threads that have ended; under the lock, which they do not need any more. Returns: how many are left. */
static int64_t join_ended(engine *self)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < self->running; i++) {
        if (self->has_ended[i]) {
            pthread_join(self->threads[i], NULL);
            continue;
        }
        self->threads[kept] = self->threads[i];
        self->has_ended[kept++] = false;
    }
    return self->running = kept;
}

PUBLIC int64_t engine_start(engine *self, int64_t count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* threads inherit it */
    pthread_mutex_lock(&self->lock);
    join_ended(self);
    self->is_stopping = false; /* threads that have not seen it stay */
    pthread_cond_broadcast(&self->ended);
    while (self->running < least(count, MOST_THREADS)) {
        int64_t number = self->running;
        self->has_ended[number] = false;
        if (pthread_create(&self->threads[number], NULL, work, self))
            break;
        self->running++;
    }
    int64_t running = self->running;
    pthread_mutex_unlock(&self->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return running;
}

PUBLIC int64_t engine_stop(engine *self, int64_t nanoseconds)
{
    int64_t end = now() + nanoseconds;
    struct timespec limit = {end / 1000000000, end % 1000000000};
    pthread_mutex_lock(&self->lock);
    self->is_stopping = true;
    pthread_cond_broadcast(&self->work);
    int64_t running, error = 0;
    while ((running = join_ended(self)) && self->is_stopping && !error) /* somebody may start them again */
        error = pthread_cond_timedwait(&self->ended, &self->lock, &limit);
    pthread_mutex_unlock(&self->lock);
    return running;
}

PUBLIC int64_t engine_submit(engine *self, engine_job *job)
{
    int64_t bad = prepare(job);
    if (bad >= 0 || !job->chunks)
        return bad;
    job->following = NULL;
    pthread_mutex_lock(&self->lock);
    if (self->head)
        self->tail->following = job;
    else
        self->head = job;
    self->tail = job;
    if (job->chunks > 1)
        pthread_cond_broadcast(&self->work);
    else
        pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    return -1;
}

PUBLIC int64_t engine_take(engine *self, engine_job *job, int64_t nanoseconds)
{
    int64_t end = now() + nanoseconds;
    for (;;) {
        pthread_mutex_lock(&self->lock);
        int64_t chunk = begin_chunk(self, job);
        pthread_mutex_unlock(&self->lock);
        if (chunk < 0)
            break;
        run_chunk(job, chunk);
        end_chunk(job);
        if (now() >= end && __atomic_load_n(&job->left, __ATOMIC_ACQUIRE))
            return 1;
    }
    for (;;) {
        uint32_t left = __atomic_load_n(&job->left, __ATOMIC_ACQUIRE);
        if (!left)
            break;
        int64_t remains = end - now();
        if (remains <= 0)
            return 1;
        struct timespec limit = {remains / 1000000000, remains % 1000000000};
        if (syscall(SYS_futex, &job->left, FUTEX_WAIT_PRIVATE, left, &limit, NULL, 0) && errno == EINTR)
            return 1;
    }
    finish(job);
    return 0;
}

PUBLIC int64_t engine_help(engine *self, engine_job *job, int64_t chunks)
{
    for (; chunks; chunks--) {
        pthread_mutex_lock(&self->lock);
        int64_t chunk = begin_chunk(self, job);
        pthread_mutex_unlock(&self->lock);
        if (chunk < 0)
            break;
        run_chunk(job, chunk);
        end_chunk(job);
    }
    int64_t end = chunks ? now() + LOOK_NANOSECONDS : 0;
    while (__atomic_load_n(&job->left, __ATOMIC_ACQUIRE))
        if (!end || now() >= end)
            return 1;
    finish(job);
    return 0;
}

PUBLIC void engine_cancel(engine *self, engine_job *job)
{
    pthread_mutex_lock(&self->lock);
    int64_t unbegun = job->chunks - job->begun;
    if (unbegun) {
        __atomic_store_n(&job->damaged, CANCELLED, __ATOMIC_RELAXED);
        job->begun = job->chunks - 1;
        begin_chunk(self, job); /* unlinks it */
        __atomic_sub_fetch(&job->left, (uint32_t)unbegun, __ATOMIC_ACQ_REL);
    }
    pthread_mutex_unlock(&self->lock);
    for (uint32_t left; (left = __atomic_load_n(&job->left, __ATOMIC_ACQUIRE));)
        syscall(SYS_futex, &job->left, FUTEX_WAIT_PRIVATE, left, NULL, NULL, 0);
}
