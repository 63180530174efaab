/* Preloaded into ranks: appends all bytes that the process sends on sockets to the file CINCH_TEST_RECORD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static void record(const struct iovec *parts, size_t count) {
  const char *path = getenv("CINCH_TEST_RECORD");
  if (path == NULL) return;
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  /* The parts of one call stay together: another thread may write between two calls. */
  if (file < 0 || writev(file, parts, (int)count) < 0) abort();
  close(file);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  ssize_t (*next)(int, const struct msghdr *, int) = dlsym(RTLD_NEXT, "sendmsg");
  record(message->msg_iov, message->msg_iovlen);
  return next(fd, message, flags);
}

ssize_t send(int fd, const void *bytes, size_t length, int flags) {
  ssize_t (*next)(int, const void *, size_t, int) = dlsym(RTLD_NEXT, "send");
  struct iovec part = {(void *)bytes, length};
  record(&part, 1);
  return next(fd, bytes, length, flags);
}

ssize_t sendto(int fd, const void *bytes, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
  ssize_t (*next)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
  struct iovec part = {(void *)bytes, length};
  record(&part, 1);
  return next(fd, bytes, length, flags, to, size);
}

ssize_t write(int fd, const void *bytes, size_t length) {
  ssize_t (*next)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
  struct stat status;
  if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) {
    struct iovec part = {(void *)bytes, length};
    record(&part, 1);
  }
  return next(fd, bytes, length);
}
