/* The engine: a few threads of the operating system that bring rows of files into given memory.
 *
 * Owns: its threads, its queue. It knows no Python, allocates nothing for a job, maps no file.
 *
 * Rows are numbered 0, 1, ... through a list of segments, each a file. A job names rows by their numbers and says
 * where they go. Numbers are checked before a byte is copied. `engine_submit` queues a job, the threads do it chunk
 * by chunk, and `engine_take` helps with what no thread has begun, then waits for what they have.
 *
 * Rows come in one of three ways
 *   - ENGINE_COPY, from mapped files: for what is in memory. A page that is not is waited for, by itself.
 *   - ENGINE_ASK, then ENGINE_READ, from the files: for what may be on the disk. An ask copies what is in memory and
 *     has the disk begin to read the rest, without waiting; a read waits for that rest.
 *   - ENGINE_FETCH has the disk begin to read rows that follow one another, and copies nothing.
 *
 * Guarantees
 *   - A job has ended once `engine_take` or `engine_cancel` has returned 0: nothing touches its memory from then on.
 *   - Nobody waits for a thread that does not run: with no threads at all, or once they are stopped, `engine_take` does
     everything itself.
 *   - A waiter is woken by signals: `engine_take` returns, and is called again.
 *   - The threads block all signals but those of faults, and end within `engine_stop`, but for one that the kernel holds.
 *   - ENGINE_READ tells of a file that is shorter than it was, or cannot be read (`failed`).
 *
 * The caller's part
 *   - Everything that a job points to stays where it is until the job has ended; files stay mapped. A file that
 *     somebody truncates while ENGINE_COPY reads it ends the process by SIGBUS.
 *   - ENGINE_READ of rows begins after ENGINE_ASK of them has ended.
 *   - A child of fork() has no threads: it makes an engine of its own, and takes no job of its parent.
 *   - `engine_*` may be called from several threads; one job is taken and cancelled by one thread at a time.
 */
#ifndef ARROWCACHE_ENGINE_H
#define ARROWCACHE_ENGINE_H

#include <stdint.h>

#define ENGINE_VERSION 4 /* of this header's structures: the caller compares it with `engine_version` */

/* A file and the rows in it. */
typedef struct {
    const uint8_t *base; /* where it is mapped; NULL: it is not, and its rows are read from the file */
    int64_t nbytes;      /* of the file */
    const int64_t *at;   /* where each buffer begins: bytes of the file; files alike may share it. NULL: it is not
                            known, and none of its rows may be asked for */
    int64_t first;       /* the number of its first row */
    const char *path;    /* of the file; NULL: it is mapped, and is not read in another way */
    int64_t device, inode; /* of the file: another one that has its path by now is not read */
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

/* Kinds of jobs. */
enum {
    ENGINE_FIXED,   /* columns of fixed width */
    ENGINE_LENGTHS, /* where a column's values are: buffer `columns[0].buffer` has their offsets, int32, in elements
                       of `columns[0].row_bytes` bytes; the buffer after it has the values */
    ENGINE_VALUES   /* the values that a job of ENGINE_LENGTHS has found */
};

/* Ways of rows; see above. There is no ENGINE_ASK of ENGINE_LENGTHS, and no ENGINE_FETCH of ENGINE_VALUES: that of
   ENGINE_LENGTHS fetches the values. */
enum { ENGINE_COPY, ENGINE_ASK, ENGINE_READ, ENGINE_FETCH };

#define ENGINE_PIECE_BYTES (128 << 10) /* of a row's column or a value, read by one call, but for its end; a disk is
                                          asked for no more at a time */

/* A job. The caller fills in all but the last part, which it sets to zeros. */
typedef struct engine_job {
    int64_t kind;
    int64_t way;
    const engine_rows *rows;
    const int64_t *ids;           /* (count) the numbers of the rows; ENGINE_FETCH: (2), the first, and one after the
                                     last */
    int64_t count;                /* how many */
    const engine_column *columns; /* ENGINE_VALUES: `columns[0].out` alone; ENGINE_FETCH: `out` is unused */
    int64_t column_count;
    int64_t *from; /* (count) where each value is, in bytes of its file; ENGINE_FIXED: unused */
    int64_t *to;   /* (count + 1) where each goes, in bytes from the first one, and where the last one ends */
    uint8_t *got;  /* of ENGINE_ASK, zeros at first, and the ENGINE_READ after it: not 0: this piece is copied; NULL:
                      none is. ENGINE_FIXED: (count, pieces of each column); ENGINE_VALUES: (count and
                      to[count] / ENGINE_PIECE_BYTES): those of value i begin at i + to[i] / ENGINE_PIECE_BYTES */
    int64_t drops; /* ENGINE_READ: what it reads from the disk leaves the page cache again */

    struct engine_job *following;
    int64_t unit, chunks, begun; /* a chunk is `unit` bytes of all that is copied, or rows where none is */
    int64_t damaged;             /* after its end: 1 + the index of a row whose offsets are out of its file */
    int64_t failed;              /* after its end: 1 + the index of a row that could not be read */
    int64_t error;               /* then: errno; 0: the file ends before it */
    int64_t missed; /* after its end: what was not in memory: pages of ENGINE_COPY, pieces of ENGINE_ASK, offsets of
                       ENGINE_READ */
    uint32_t left;  /* chunks whose end was not seen yet */
} engine_job;

typedef struct engine engine;

/* ENGINE_VERSION of the library. */
int64_t engine_version(void);

/* An engine without threads; NULL: no memory. It is never freed: who waits for it may still look at it. */
engine *engine_new(void);

/* Have `count` threads, at least; ends an `engine_stop` that still waits. Returns: their number; fewer where the
   system refuses more. */
int64_t engine_start(engine *, int64_t count);

/* End the threads; jobs that they have not begun stay queued. Returns: the number that still ran after `nanoseconds`. */
int64_t engine_stop(engine *, int64_t nanoseconds);

/* Check a job and queue it: what the disk is asked for comes before what is copied or waited for. Returns: -1: it is
   queued; else the index of an id that is out of range or whose file is not known. */
int64_t engine_submit(engine *, engine_job *);

/* Check a job of ENGINE_COPY and do it, here and now. Returns: as engine_submit; -2: some file is not mapped: nothing
   was done. */
int64_t engine_copy(engine_job *);

/* Help with a job, if it is one of ENGINE_COPY or there are no threads, then wait for it. Returns: 0: it has ended;
   1: not within `nanoseconds`, or a signal came. */
int64_t engine_take(engine *, engine_job *, int64_t nanoseconds);

/* Do at most `chunks` chunks of a job of ENGINE_COPY that no thread has begun; if all are begun then, look for its end
   for some microseconds. Never sleeps. Returns: 0: it has ended, as of engine_take; 1: not yet. */
int64_t engine_help(engine *, engine_job *, int64_t chunks);

/* Have no thread begin another chunk of a job, and wait for those that were begun, whatever signals come. Returns: 0:
   it has ended; 1: the kernel still holds a thread after `nanoseconds`. */
int64_t engine_cancel(engine *, engine_job *, int64_t nanoseconds);

/* The segment of each of some rows. Returns: -1, or the index of an id that is out of range. */
int64_t engine_segments(const engine_rows *, const int64_t *ids, int64_t count, int64_t *segments);

#endif
