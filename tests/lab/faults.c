/* One fault in one call of a function of libc on files below a folder. Loaded by LD_PRELOAD; tests/lab/faults.py
   arms it. Only calls of that function count, since those of several threads come in another order each time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <unistd.h>

enum { ERROR = 1, SHORT = 2, DIE_BEFORE = 3, DIE_AFTER = 4 };
static char folder[PATH_MAX], function[64];
static int mode, code;
static atomic_int left; /* calls until the fault; 0: not armed; below: done */
static atomic_int hit;

void faults_arm(const char *below, const char *name, int call, int how, int error) {
  snprintf(folder, sizeof folder, "%s", below);
  snprintf(function, sizeof function, "%s", name);
  mode = how, code = error, hit = 0;
  left = call;
}
int faults_hit(void) { return hit; }

static int below(const char *path) {
  size_t size = strlen(folder);
  return size && path && !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}
static int mine(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return below(path);
}
/* Whether this call is the one. */
static int now(int concerned, const char *name) {
  if (left <= 0 || !concerned || strcmp(name, function) || atomic_fetch_sub(&left, 1) != 1) return 0;
  hit = 1;
  if (mode == DIE_BEFORE) _exit(77);
  return 1;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAULT(type, name, concerned, call)                                                                   \
  do {                                                                                                       \
    int it = now(concerned, #name);                                                                          \
    if (it && mode != DIE_AFTER) { errno = code; return (type)-1; }                                          \
    type result = call;                                                                                      \
    if (it) _exit(77);                                                                                       \
    return result;                                                                                           \
  } while (0)

ssize_t write(int fd, const void *data, size_t size) {
  int it = now(mine(fd), "write");
  if (it && mode == ERROR) { errno = code; return -1; }
  ssize_t result = REAL(write)(fd, data, it && mode == SHORT && size > 1 ? size / 2 : size);
  if (it && mode == DIE_AFTER) _exit(77);
  return result;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  FAULT(ssize_t, pwrite64, mine(fd), REAL(pwrite64)(fd, data, size, at));
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
  FAULT(ssize_t, sendfile64, mine(out), REAL(sendfile64)(out, in, at, size));
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  FAULT(ssize_t, copy_file_range, mine(out), REAL(copy_file_range)(in, from, out, to, size, flags));
}
int fsync(int fd) { FAULT(int, fsync, mine(fd), REAL(fsync)(fd)); }
int fdatasync(int fd) { FAULT(int, fdatasync, mine(fd), REAL(fdatasync)(fd)); }
int ftruncate64(int fd, off64_t size) { FAULT(int, ftruncate64, mine(fd), REAL(ftruncate64)(fd, size)); }
int rename(const char *a, const char *b) { FAULT(int, rename, below(b), REAL(rename)(a, b)); }
int unlink(const char *path) { FAULT(int, unlink, below(path), REAL(unlink)(path)); }
int close(int fd) {
  int it = now(mine(fd), "close"), result = REAL(close)(fd);
  if (it && mode == DIE_AFTER) _exit(77);
  if (it && mode == ERROR) { errno = code; return -1; }
  return result;
}
int open64(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t bits = va_arg(rest, mode_t);
  va_end(rest);
  FAULT(int, open64, below(path), REAL(open64)(path, flags, bits));
}
