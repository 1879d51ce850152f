/* See engine.h. */
#define _GNU_SOURCE
#include "engine.h"
#include "chunks.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
    MAX_THREADS = 64,
    STOPPED_NANOSECONDS = 50000000, /* so long a waiter that sleeps does not see that the threads are stopped */
    LOOK_NANOSECONDS = 200000, /* some chunks take less; who sleeps beside a busy Python thread has the GIL back after 5 ms */
};

struct engine {
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work, ended;
    engine_job *head, *tail; /* jobs with chunks that nobody has begun */
    pthread_t threads[MAX_THREADS];
    bool has_ended[MAX_THREADS];
    int64_t running; /* threads that were started and not joined: the first of `threads` */
    bool is_stopping;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

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
        chunks_run(job, chunk);
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

/* Join the threads that have ended; under the lock, which they do not need any more. Returns: the number that is left. */
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
    const int of_faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL}; /* faulthandler tells of them */
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof of_faults / sizeof *of_faults; i++)
        sigdelset(&blocked, of_faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before); /* threads inherit it */
    pthread_mutex_lock(&self->lock);
    join_ended(self);
    self->is_stopping = false; /* threads that have not seen it stay */
    pthread_cond_broadcast(&self->ended);
    while (self->running < least(count, MAX_THREADS)) {
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

PUBLIC int64_t engine_copy(engine_job *job)
{
    int64_t bad = chunks_prepare(job);
    if (bad < 0 && job->way != ENGINE_COPY)
        return -2;
    for (int64_t chunk = 0; chunk < job->chunks; chunk++)
        chunks_run(job, chunk);
    job->left = 0;
    chunks_finish(job);
    return bad;
}

/* Returns: true: a job asks the disk for bytes, or finds the bytes to ask for. */
static bool asks(const engine_job *job)
{
    return job->way == ENGINE_ASK || job->way == ENGINE_FETCH || (job->way == ENGINE_READ && job->kind == ENGINE_LENGTHS);
}

PUBLIC int64_t engine_submit(engine *self, engine_job *job)
{
    int64_t bad = chunks_prepare(job);
    if (bad >= 0 || !job->chunks)
        return bad;
    pthread_mutex_lock(&self->lock);
    engine_job *before = asks(job) ? NULL : self->tail;
    for (engine_job *each = self->head; asks(job) && each && asks(each); each = each->following)
        before = each;
    engine_job **link = before ? &before->following : &self->head;
    job->following = *link;
    *link = job;
    if (self->tail == before)
        self->tail = job;
    if (job->chunks > 1)
        pthread_cond_broadcast(&self->work);
    else
        pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    return -1;
}

/* Do a chunk that no thread has begun. Returns: false: there is none. */
static bool do_chunk(engine *self, engine_job *job)
{
    pthread_mutex_lock(&self->lock);
    int64_t chunk = begin_chunk(self, job);
    pthread_mutex_unlock(&self->lock);
    if (chunk < 0)
        return false;
    chunks_run(job, chunk);
    end_chunk(job);
    return true;
}

/* Returns: true: a waiter leaves a job to the threads. Ctrl-C ends its sleep, and would not end its read. */
static bool is_theirs(engine *self, const engine_job *job)
{
    pthread_mutex_lock(&self->lock);
    bool is_so = job->way != ENGINE_COPY && self->running && !self->is_stopping;
    pthread_mutex_unlock(&self->lock);
    return is_so;
}

/* Wait for the last chunk. Returns: 0; ETIMEDOUT: not before `end`; EINTR: a signal came. */
static int wait_for(engine_job *job, int64_t end, bool is_patient)
{
    for (uint32_t left; (left = __atomic_load_n(&job->left, __ATOMIC_ACQUIRE));) {
        int64_t remains = end - now();
        if (remains <= 0)
            return ETIMEDOUT;
        struct timespec limit = {remains / 1000000000, remains % 1000000000};
        long failed = syscall(SYS_futex, &job->left, FUTEX_WAIT_PRIVATE, left, &limit, NULL, 0);
        if (failed && errno == EINTR && !is_patient)
            return EINTR;
    }
    return 0;
}

PUBLIC int64_t engine_take(engine *self, engine_job *job, int64_t nanoseconds)
{
    int64_t end = now() + nanoseconds;
    int error;
    do {
        while (!is_theirs(self, job) && do_chunk(self, job))
            if (now() >= end && __atomic_load_n(&job->left, __ATOMIC_ACQUIRE))
                return 1;
        error = wait_for(job, least(end, now() + STOPPED_NANOSECONDS), false);
    } while (error == ETIMEDOUT && now() < end);
    if (error)
        return 1;
    chunks_finish(job);
    return 0;
}

PUBLIC int64_t engine_help(engine *self, engine_job *job, int64_t chunks)
{
    if (job->way != ENGINE_COPY) /* whoever helps may have the GIL */
        chunks = 0;
    while (chunks && do_chunk(self, job))
        chunks--;
    int64_t end = chunks ? now() + LOOK_NANOSECONDS : 0;
    while (__atomic_load_n(&job->left, __ATOMIC_ACQUIRE))
        if (!end || now() >= end)
            return 1;
    chunks_finish(job);
    return 0;
}

PUBLIC int64_t engine_cancel(engine *self, engine_job *job, int64_t nanoseconds)
{
    int64_t end = now() + nanoseconds;
    pthread_mutex_lock(&self->lock);
    int64_t unbegun = job->chunks - job->begun;
    if (unbegun) {
        __atomic_store_n(&job->damaged, CANCELLED, __ATOMIC_RELAXED);
        job->begun = job->chunks - 1;
        begin_chunk(self, job); /* unlinks it */
        __atomic_sub_fetch(&job->left, (uint32_t)unbegun, __ATOMIC_ACQ_REL);
    }
    pthread_mutex_unlock(&self->lock);
    return wait_for(job, end, true) != 0;
}
