/* The engine: a few threads of the operating system that copy rows of mapped files into given memory.
 *
 * Owns: its threads, its queue. It knows no Python, allocates nothing for a job, opens and maps no file.
 *
 * Rows are numbered 0, 1, ... through a list of segments, each a mapped file. A job names rows by their numbers and
 * says where they go. Numbers are checked before a byte is copied. `engine_submit` queues a job, the threads copy it
 * chunk by chunk, and `engine_take` helps with what no thread has begun, then waits for what they have.
 *
 * Guarantees
 *   - A job has ended once `engine_take` has returned 0, or `engine_cancel`: nothing touches its memory from then on.
 *   - Nobody waits for a thread that does not run: with no threads at all, `engine_take` copies everything itself.
 *   - A waiter is woken by signals: `engine_take` returns, and is called again.
 *   - The threads block all signals, and end within `engine_stop`, but for one that the kernel holds.
 *
 * The caller's part
 *   - Everything that a job points to stays where it is until the job has ended; files stay mapped. A file that
 *     somebody truncates while it is mapped ends the process by SIGBUS.
 *   - A child of fork() has no threads: it makes an engine of its own, and takes no job of its parent.
 *   - `engine_*` may be called from several threads; one job is taken and cancelled by one thread at a time.
 */
#ifndef ARROWCACHE_ENGINE_H
#define ARROWCACHE_ENGINE_H

#include <stdint.h>

#define ENGINE_VERSION 3 /* of this header's structures: the caller compares it with `engine_version` */

/* A mapped file and the rows in it. */
typedef struct {
    const uint8_t *base; /* of the file; NULL: it is not mapped, and none of its rows may be asked for */
    int64_t nbytes;      /* of the file */
    const int64_t *at;   /* where each buffer begins: bytes from base; files alike may share it */
    int64_t first;       /* the number of its first row */
    const uint8_t *warm; /* not 0: its pages are in memory, as far as is known; NULL: they may not be */
    const char *path;    /* of the file, absolute; the caller's */
    int64_t device, inode; /* of the file, when it was checked */
} engine_segment;

/* Rows of segments, numbered one after another. */
typedef struct {
    const engine_segment *segments; /* count, and one more, whose `first` is `rows` */
    const int64_t *blocks;          /* of each block of 1 << block_shift rows, the segment of its first row, and one
                                       more for the last row; unused where rows_each is given */
    int64_t count;
    int64_t first;     /* the lowest number that may be asked for */
    int64_t rows;      /* the highest, and one more */
    int64_t rows_each; /* > 0: each segment has so many, but for a last one that may have less */
    int64_t block_shift;
} engine_rows;

/* A column of fixed width on its way. */
typedef struct {
    int64_t buffer;    /* which of a segment's `at` */
    int64_t row_bytes; /* > 0 */
    uint8_t *out;      /* where its rows go, one after another */
} engine_column;

enum {
    ENGINE_FIXED,   /* copy columns of fixed width */
    ENGINE_LENGTHS, /* find a column's values: buffer `columns[0].buffer` has their offsets, int32, in elements of
                       `columns[0].row_bytes` bytes; the buffer after it has the values */
    ENGINE_VALUES   /* copy the values that a job of ENGINE_LENGTHS has found */
};

/* What to copy. The caller fills all but the last part in, with zeros there. */
typedef struct engine_job {
    int64_t kind;
    const engine_rows *rows;      /* ENGINE_VALUES: unused */
    const int64_t *ids;           /* the numbers of the rows; ENGINE_VALUES: unused */
    int64_t count;                /* how many */
    const engine_column *columns; /* ENGINE_VALUES: `columns[0].out` alone */
    int64_t column_count;
    const uint8_t **from; /* (count): where each value is; ENGINE_FIXED: unused */
    int64_t *to;          /* (count + 1): where each goes, in bytes from the first one, and where the last one ends */

    struct engine_job *following;
    int64_t unit, parts, chunks, begun; /* a chunk is `unit` rows, or one of `parts` of a row, or bytes of values */
    int64_t damaged;                    /* after its end: 1 + the index of a row whose offsets are out of its file */
    int64_t faults;                     /* after its end: times that a thread had to wait for a page from the disk */
    uint32_t left;                      /* chunks whose end was not seen yet */
} engine_job;

typedef struct engine engine;

/* ENGINE_VERSION of the library. */
int64_t engine_version(void);

/* An engine without threads; NULL: no memory. It is never freed: who waits for it may still look at it. */
engine *engine_new(void);

/* Have `count` threads, at least; ends an `engine_stop` that still waits. Returns: how many there are; fewer where the
   system refuses more. */
int64_t engine_start(engine *, int64_t count);

/* End the threads; jobs that they have not begun stay queued. Returns: how many still ran after `nanoseconds`. */
int64_t engine_stop(engine *, int64_t nanoseconds);

/* Check a job and queue it. Returns: -1: it is queued; else the index of an id that is out of range or not mapped. */
int64_t engine_submit(engine *, engine_job *);

/* Check a job and copy it, here and now. Returns: as engine_submit. */
int64_t engine_copy(engine_job *);

/* Help with a job, then wait for it. Returns: 0: it has ended; 1: not within `nanoseconds`, or a signal came. */
int64_t engine_take(engine *, engine_job *, int64_t nanoseconds);

/* Copy at most `chunks` chunks of a job that no thread has begun; if all are begun then, look for its end for some
   microseconds. Never sleeps. Returns: 0: it has ended, as of engine_take; 1: not yet. */
int64_t engine_help(engine *, engine_job *, int64_t chunks);

/* Whether the pages of all rows of a job are in memory, as far as is known. Returns: 1 or 0; 0 for a bad id. */
int64_t engine_is_warm(const engine_job *);

/* Have no thread begin another chunk of a job, and wait for those that were begun, whatever signals come: its end. */
void engine_cancel(engine *, engine_job *);

/* Have the disk begin to read the rows of a job of ENGINE_FIXED; returns before it has. What is out of range is left. */
void engine_ask(const engine_job *);

/* The segment of each of some rows. Returns: -1, or the index of an id that is out of range. */
int64_t engine_segments(const engine_rows *, const int64_t *ids, int64_t count, int64_t *segments);

#endif
