/* Preloaded: reads of $SLOW_DISK_BYTES (4096) or more of HDF5 files fail or hang while the file $SLOW_DISK exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_hdf5(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return strstr(path, ".h5") || strstr(path, ".hdf5");
}

static int is_bad(int fd, size_t count) {
    const char *flag = getenv("SLOW_DISK");
    const char *bytes = getenv("SLOW_DISK_BYTES");
    return count >= (size_t)(bytes ? atol(bytes) : 4096) && flag && access(flag, F_OK) == 0 && is_hdf5(fd);
}

static ssize_t misbehave(void) {
    const char *how = getenv("SLOW_DISK_HOW");
    if (how && strcmp(how, "hang") == 0)
        for (;;) pause();
    if (how && strcmp(how, "fail_once") == 0) unlink(getenv("SLOW_DISK"));
    errno = EIO;
    return -1;
}

static size_t total(const struct iovec *parts, int num) {
    size_t count = 0;
    for (int i = 0; i < num; i++) count += parts[i].iov_len;
    return count;
}

/* HDF5 calls pread, the direct reads of contiguous datasets preadv, the digests read. */
#define SHIM(name, offset_type)                                                  \
    ssize_t name(int fd, void *to, size_t count, offset_type offset) {           \
        static ssize_t (*real)(int, void *, size_t, offset_type);                \
        if (!real) real = dlsym(RTLD_NEXT, #name);                               \
        return is_bad(fd, count) ? misbehave() : real(fd, to, count, offset);    \
    }

#define SHIM_V(name, offset_type)                                                            \
    ssize_t name(int fd, const struct iovec *parts, int num, offset_type offset) {           \
        static ssize_t (*real)(int, const struct iovec *, int, offset_type);                 \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                           \
        return is_bad(fd, total(parts, num)) ? misbehave() : real(fd, parts, num, offset);   \
    }

SHIM(pread, off_t)
SHIM(pread64, off64_t)
SHIM_V(preadv, off_t)
SHIM_V(preadv64, off64_t)

/* What Python's os.preadv calls. Such a disk's files don't lie in the page cache: what may not wait isn't read. */
#define SHIM_V2(name, offset_type)                                                                   \
    ssize_t name(int fd, const struct iovec *parts, int num, offset_type offset, int flags) {        \
        static ssize_t (*real)(int, const struct iovec *, int, offset_type, int);                    \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                   \
        if (flags & RWF_NOWAIT) return errno = EAGAIN, -1;                                           \
        return is_bad(fd, total(parts, num)) ? misbehave() : real(fd, parts, num, offset, flags);    \
    }

SHIM_V2(preadv2, off_t)
SHIM_V2(preadv64v2, off64_t)

ssize_t read(int fd, void *to, size_t count) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    const char *digests = getenv("SLOW_DISK_DIGESTS");
    return digests && is_bad(fd, count) ? misbehave() : real(fd, to, count);
}
