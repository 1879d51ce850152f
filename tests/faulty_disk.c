/* A disk that fails or answers never, put before the C library by LD_PRELOAD. See faulty_disk.py.
 *
 * Of files in whose path `disk_name` is, calls of a kind fail with `disk_error`, or wait while `disk_is_held`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, READ, ADVISE, KINDS };

char disk_name[256]; /* "": no file */
volatile int disk_error[KINDS], disk_is_held[KINDS], disk_calls[KINDS];

static int fails(int kind, const char *path)
{
    if (!disk_name[0] || !strstr(path, disk_name))
        return 0;
    __atomic_fetch_add(&disk_calls[kind], 1, __ATOMIC_RELAXED);
    while (disk_is_held[kind])
        usleep(500);
    return errno = disk_error[kind];
}

static int fails_at(int kind, int fd)
{
    char link[64], path[1024] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return disk_name[0] && readlink(link, path, sizeof path - 1) > 0 ? fails(kind, path) : 0;
}

static int opened(const char *path, int flags, mode_t mode)
{
    return fails(OPEN, path) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opened(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opened(path, flags | O_LARGEFILE, mode);
}

ssize_t read(int fd, void *to, size_t count)
{
    return fails_at(READ, fd) ? -1 : syscall(SYS_read, fd, to, count);
}

ssize_t pread(int fd, void *to, size_t count, off_t at)
{
    return fails_at(READ, fd) ? -1 : syscall(SYS_pread64, fd, to, count, at);
}

ssize_t pread64(int fd, void *to, size_t count, off64_t at)
{
    return pread(fd, to, count, at);
}

ssize_t preadv2(int fd, const struct iovec *to, int count, off_t at, int flags)
{
    if (disk_is_held[READ] && flags & RWF_NOWAIT) {
        errno = EAGAIN;
        return -1;
    }
    return fails_at(READ, fd) ? -1 : syscall(SYS_preadv2, fd, to, count, at, 0, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *to, int count, off64_t at, int flags)
{
    return preadv2(fd, to, count, at, flags);
}

ssize_t readahead(int fd, off64_t at, size_t count)
{
    return fails_at(ADVISE, fd) ? -1 : syscall(SYS_readahead, fd, at, count);
}

int posix_fadvise(int fd, off_t at, off_t count, int advice)
{
    int error = fails_at(ADVISE, fd);
    if (error)
        return error;
    return syscall(SYS_fadvise64, fd, at, count, advice) ? errno : 0;
}

int posix_fadvise64(int fd, off64_t at, off64_t count, int advice)
{
    return posix_fadvise(fd, at, count, advice);
}
