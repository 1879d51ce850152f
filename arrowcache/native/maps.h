/* Maps: read-only mappings of whole files, without a descriptor each.
 *
 * Owns: the number of files that are mapped in this process, and of their bytes; nothing else. It allocates nothing.
 *
 * Guarantees
 *   - What is opened is a plain file, no link; its time of last reading stays, where that is allowed.
 *   - It is mapped only if its length is within a limit. One that has a huge page begins at one: what of it is in the
 *     page cache as huge pages is mapped as such, which makes random reads up to twice as fast.
 *   - No forked child inherits a mapping: it would prolong the life of a file that its parent gave up. A touch reads its
 *     page alone from the disk, not megabytes around it.
 *   - It is private: whoever makes it writable changes no file, and reserves no memory.
 *   - `address` and `fd` always say what there is: a call that was made twice does nothing the second time.
 *
 * The caller's part
 *   - A structure stays where it is, and is used by one thread at a time, until nothing of it is mapped or open. Any
 *     thread may read its members meanwhile.
 *   - Nobody reads a file that is being unmapped. A file that somebody truncates while it is mapped ends the process by
 *     SIGBUS where it is read.
 *   - A child of fork() calls `maps_forget`, and unmaps nothing that it inherits.
 */
#ifndef ARROWCACHE_MAPS_H
#define ARROWCACHE_MAPS_H

#include <stdint.h>

#define MAPS_LENGTH (-1) /* in place of an error's number: the file is empty, or too long */
#define MAPS_WAITS (-2)  /* in place of an answer: the disk would have to be waited for */

typedef struct {
    const char *path; /* absolute; the caller's, as are fd = -1, and 0 in all else, at first */
    int64_t fd;       /* -1: it is not open; mapped it stays without */
    uint8_t *address; /* NULL: it is not mapped */
    int64_t nbytes;   /* of the file */
    int64_t device, inode;
} maps_file;

/* Bytes that files have in common. */
typedef struct {
    int64_t start, nbytes; /* where in a file */
    const uint8_t *bytes;
} maps_part;

/* Files that are alike: as long, and equal in these parts, which rise and do not overlap. */
typedef struct {
    int64_t nbytes;
    int64_t count;
    const maps_part *parts;
} maps_kind;

/* Bytes of files that may be mapped still: as many as leave a share for all else, such as batches, of the addresses that
   this process may have (RLIMIT_AS, as it is now) and has not in other use.
   `quarters`: the share of all files together, those that are mapped and those to come: 2 is half.
   Returns: INT64_MAX where addresses are not limited; 0 where it cannot be known, for want of a descriptor. */
int64_t maps_room(int64_t quarters);

/* Open a file of 1 to `limit` bytes, and map it, if less than `most` files are mapped then, `maps_room` of half has room
   for it and there are addresses. Returns: 0: it is open, and `address` says whether it is mapped; MAPS_LENGTH; else the
   error's number. It is neither open nor mapped then, but `nbytes` tells how long it is. */
int64_t maps_open(maps_file *, int64_t limit, int64_t most);

/* Open files, one after another, map those of a kind, as `maps_open`, and close them all. None is open or mapped before.
   `waits`: for the disk; else it stops at a file that is not in memory.
   `alike`: for each file 1, or 0: it is of another kind, or cannot be opened or read; it is not mapped then.
   Returns: the number of files that it has done. */
int64_t maps_open_alike(maps_file *const *, int64_t count, const maps_kind *, int64_t most, int64_t waits,
                        uint8_t *alike);

/* Compare an open file to a kind. Returns: 1: it is of the kind; 0: it is not, or cannot be read; MAPS_WAITS: it is not
   in memory, and `waits`, for the disk, is 0. */
int64_t maps_is_alike(const maps_file *, const maps_kind *, int64_t waits);

/* Map a file that is open, however many are mapped. Returns: 0, or the error's number. */
int64_t maps_map(maps_file *);

/* Close a file; it stays mapped. */
void maps_close(maps_file *);

/* Unmap files, and close what is open; faster where each lies below the one before it. Returns: 0: all are unmapped;
   else the number of the error at one that is not. */
int64_t maps_unmap(maps_file *const *, int64_t count);

/* Returns: the number of mapped files. */
int64_t maps_count(void);

/* In a forked child: none is mapped. */
void maps_forget(void);

#endif
