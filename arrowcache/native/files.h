/* Files: bytes of segments' files, asked of the disk or read, but for what is mapped.
 *
 * Whoever reads has a `reader` of its own, which keeps some of the files open that it read last: a chunk's rows are of
 * few files where they are shuffled in a window. Nothing else is kept open, so no descriptor outlives a chunk, nor a
 * segment its lease.
 */
#ifndef ARROWCACHE_FILES_H
#define ARROWCACHE_FILES_H

#include "engine.h"

#include <stdbool.h>

typedef struct {
    struct {
        const engine_segment *segment; /* NULL: none is open */
        int fd;                        /* < 0: -errno: it can't be opened, or is another file by now */
    } files[16]; /* a segment has one place, by its address */
} reader;

/* Returns: true: a file can be read by itself; false: from its map alone. */
bool file_opens(reader *, const engine_segment *);

/* Copy bytes of a file if they are in memory. Returns: 1: they are copied; 0: not. Never waits for the disk. */
int file_peek(reader *, const engine_segment *, int64_t at, uint8_t *out, int64_t nbytes);

/* Have the disk begin to read bytes of a file. Blocks: while its queue is full. */
void file_ask(reader *, const engine_segment *, int64_t at, int64_t nbytes);

/* Read bytes of a file; they are copied from its map, if it has one, where it can't be opened. Blocks: for the disk.
   Returns: 0; else errno, or -1: the file ends before them. */
int file_read(reader *, const engine_segment *, int64_t at, uint8_t *out, int64_t nbytes);

/* Have bytes of a file leave the page cache, but for pages that are mapped, and for the last page if bytes behind these
   begin in it: whoever reads in order reads them next. */
void file_drop(reader *, const engine_segment *, int64_t at, int64_t nbytes);

/* Close what is open. */
void file_end(reader *);

#endif
