/* A profiler and a tuner for NCCL's plug-in interfaces, versions 5 and 6, which write what they get to the file
   PLUGIN_TEST_FILE. The tuner makes the algorithm PLUGIN_TEST_PREFER (tree, ring or nvls) with the protocol
   PLUGIN_TEST_PROTOCOL (ll, ll128 or simple) the cheapest where the table has it, and sets PLUGIN_TEST_CHANNELS
   channels. It disables all algorithms for `none`, and fails for `error`.

   Macros make plug-ins that cannot be used: VERSION=4 has an old version only, INIT_FAILS refuses all communicators,
   and NO_FUNCTIONS lacks functions. */
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 6
#endif
#define JOIN(name, version) name##version
#define VERSIONED(name, version) JOIN(name, version)

enum { LOG_INFO = 3, SUBSYSTEM_INIT = 1, SYSTEM_ERROR = 2 };

typedef void log_function(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);

static FILE *output;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Writes one line. */
__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
  va_list list;
  pthread_mutex_lock(&lock);
  const char *path = getenv("PLUGIN_TEST_FILE");
  if (output == NULL && path != NULL) output = fopen(path, "a");
  if (output != NULL) {
    va_start(list, format);
    vfprintf(output, format, list);
    va_end(list);
    fputc('\n', output);
    fflush(output);
  }
  pthread_mutex_unlock(&lock);
}

static const char *text(const char *maybe) { return maybe == NULL ? "-" : maybe; }

/* Kinds of events. */
enum {
  GROUP = 1 << 0,
  COLL = 1 << 1,
  P2P = 1 << 2,
  GROUP_API = 1 << 8,
  COLL_API = 1 << 9,
  P2P_API = 1 << 10,
};

struct event {
  uint64_t kind;
  void *parent;
  int rank;
  union {
    struct {
      bool captured;
      int depth;
    } group_api;
    struct {
      const char *func;
      size_t count;
      const char *type;
      int root;
      void *stream;
      bool captured;
    } coll_api;
    struct {
      const char *func;
      size_t count;
      const char *type;
      void *stream;
      bool captured;
    } p2p_api;
    struct {
      uint64_t number;
      const char *func;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *type;
      uint8_t channels;
      uint8_t warps;
      const char *algorithm;
      const char *protocol;
      void *group;
    } coll;
    struct {
      const char *func;
      void *buffer;
      const char *type;
      size_t count;
      int peer;
      uint8_t channels;
      void *group;
    } p2p;
    uint64_t words[11];
  };
};

/* Contexts and events are numbers behind an address. */
struct handle {
  int number;
};

static struct handle *new_handle(void) {
  static int last;
  struct handle *made = malloc(sizeof *made);
  made->number = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
  return made;
}

static int number(const void *handle) { return handle == NULL ? 0 : ((const struct handle *)handle)->number; }

static int profiler_init(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                         log_function *log) {
  const char *wanted = getenv("PLUGIN_TEST_MASK");
  struct handle *made = new_handle();
#ifdef INIT_FAILS
  free(made);
  return SYSTEM_ERROR;
#endif
  *mask = wanted == NULL ? 0xfff : atoi(wanted);
  log(LOG_INFO, SUBSYSTEM_INIT, __FILE__, __LINE__,
      "from the plug-in: %d %s %c %ld %g %g %g %g %g %g %g %g %g %g %d %s %lld", rank, "text", 'c', -5L, 1.5, 2.5, 3.5,
      4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 42, "end", 1LL << 40);
  note("profiler %d init id=%d name=%s nodes=%d ranks=%d rank=%d", made->number, id != 0, text(name), nodes, ranks,
       rank);
  *context = made;
  return 0;
}

static int profiler_start(void *context, void **handle, struct event *event) {
  struct handle *made = new_handle();
  *handle = made;
  int own = made->number, of = number(context), parent = number(event->parent);
  switch (event->kind) {
    case GROUP_API:
      note("%d start group_api of=%d parent=%d depth=%d captured=%d", own, of, parent, event->group_api.depth,
           event->group_api.captured);
      break;
    case COLL_API:
      note("%d start coll_api of=%d parent=%d func=%s count=%zu type=%s root=%d captured=%d", own, of, parent,
           text(event->coll_api.func), event->coll_api.count, text(event->coll_api.type), event->coll_api.root,
           event->coll_api.captured);
      break;
    case P2P_API:
      note("%d start p2p_api of=%d parent=%d func=%s count=%zu type=%s captured=%d", own, of, parent,
           text(event->p2p_api.func), event->p2p_api.count, text(event->p2p_api.type), event->p2p_api.captured);
      break;
    case GROUP:
      note("%d start group of=%d parent=%d", own, of, parent);
      break;
    case COLL:
      note("%d start coll of=%d parent=%d group=%d rank=%d number=%d func=%s buffers=%d count=%zu type=%s root=%d "
           "channels=%d algorithm=%s protocol=%s",
           own, of, parent, number(event->coll.group), event->rank, (int)event->coll.number, text(event->coll.func),
           event->coll.send != NULL && event->coll.receive != NULL, event->coll.count, text(event->coll.type),
           event->coll.root, event->coll.channels, text(event->coll.algorithm), text(event->coll.protocol));
      break;
    case P2P:
      note("%d start p2p of=%d parent=%d group=%d rank=%d func=%s buffer=%d count=%zu type=%s peer=%d", own, of,
           parent, number(event->p2p.group), event->rank, text(event->p2p.func), event->p2p.buffer != NULL,
           event->p2p.count, text(event->p2p.type), event->p2p.peer);
      break;
    default:
      note("%d start %llu of=%d parent=%d", own, (unsigned long long)event->kind, of, parent);
  }
  return 0;
}

static int profiler_stop(void *handle) {
  note("%d stop", number(handle));
  return 0;
}

static int profiler_record(void *handle, int state, void *arguments) {
  note("%d state %d %d", number(handle), state, arguments != NULL);
  return 0;
}

static int profiler_finalize(void *context) {
  note("profiler %d finalize", number(context));
  return 0;
}

struct profiler {
  const char *name;
  int (*init)(void **, uint64_t, int *, const char *, int, int, int, log_function *);
  int (*start)(void *, void **, struct event *);
  int (*stop)(void *);
  int (*record)(void *, int, void *);
  int (*finalize)(void *);
};

const struct profiler VERSIONED(ncclProfiler_v, VERSION) = {
    .name = "recorder",
    .init = profiler_init,
    .start = profiler_start,
#ifndef NO_FUNCTIONS
    .stop = profiler_stop,
#endif
    .record = profiler_record,
    .finalize = profiler_finalize,
};

enum { ALGORITHMS = 7, PROTOCOLS = 3, TREE = 0, RING = 1, NVLS = 4, SIMPLE = 2, CONSTANTS = 144 };

/* Returns the number of a name in a list that ends with NULL; -1 for NULL and unknown names. */
static int number_of(const char *name, const char *const *names) {
  for (int n = 0; name != NULL && names[n] != NULL; n++) {
    if (strcmp(name, names[n]) == 0) return n;
  }
  return -1;
}

static int tuner_init(void **context, uint64_t id, size_t ranks, size_t nodes, log_function *log, const int *domains,
                      double *constants) {
  struct handle *made = new_handle();
#ifdef INIT_FAILS
  free(made);
  return SYSTEM_ERROR;
#endif
  log(LOG_INFO, SUBSYSTEM_INIT, __FILE__, __LINE__, "tuner without arguments");
  constants[0] = constants[CONSTANTS - 1] = 1;
  note("tuner %d init id=%d ranks=%zu nodes=%zu domains=%d,%d,%d", made->number, id != 0, ranks, nodes, domains[0],
       domains[1], domains[2]);
  *context = made;
  return 0;
}

static int tuner_info(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int registered, int *channels) {
  float(*table)[PROTOCOLS] = (float(*)[PROTOCOLS])costs;
  static const char *const algorithms_by_number[] = {"tree", "ring", "2", "3", "nvls", NULL};
  static const char *const protocols_by_number[] = {"ll", "ll128", "simple", NULL};
  const char *prefer = getenv("PLUGIN_TEST_PREFER"), *count = getenv("PLUGIN_TEST_CHANNELS");
  int algorithm = number_of(prefer, algorithms_by_number);
  int protocol = number_of(getenv("PLUGIN_TEST_PROTOCOL"), protocols_by_number);
  int existing = 0;
  if (algorithms != ALGORITHMS || protocols != PROTOCOLS) return SYSTEM_ERROR;
  for (int a = 0; a < ALGORITHMS; a++) {
    for (int p = 0; p < PROTOCOLS; p++) existing += table[a][p] >= 0;
  }
  note("tuner %d info func=%d bytes=%zu operations=%d registered=%d channels=%d entries=%d tree=%d ring=%d",
       number(context), func, bytes, operations, registered, *channels, existing, table[TREE][SIMPLE] > 0,
       table[RING][SIMPLE] > 0);
  if (count != NULL) *channels = atoi(count);
  if (prefer == NULL) return 0;
  if (strcmp(prefer, "error") == 0) {
    table[TREE][SIMPLE] = 0;
    return SYSTEM_ERROR;
  }
  if (strcmp(prefer, "none") == 0) {
    for (int a = 0; a < ALGORITHMS; a++) {
      for (int p = 0; p < PROTOCOLS; p++) table[a][p] = -1;
    }
  }
  if (algorithm < 0) return 0;
  if (protocol < 0) protocol = SIMPLE;
  if (algorithm == NVLS || table[algorithm][protocol] >= 0) {
    note("tuner %d takes func=%d bytes=%zu", number(context), func, bytes);
    table[algorithm][protocol] = 0;
  }
  return 0;
}

static int tuner_finalize(void *context) {
  note("tuner %d finalize", number(context));
  return 0;
}

/* Ends the test: cinch cuts messages by its own rules. */
static int tuner_chunk(void *context, int func, size_t bytes, int algorithm, int protocol, int channels,
                       size_t *chunk) {
  (void)context, (void)func, (void)bytes, (void)algorithm, (void)protocol, (void)channels, (void)chunk;
  abort();
}

struct tuner {
  const char *name;
  int (*init)(void **, uint64_t, size_t, size_t, log_function *, const int *, double *);
  int (*info)(void *, int, size_t, int, float **, int, int, int, int *);
  int (*finalize)(void *);
  int (*chunk)(void *, int, size_t, int, int, int, size_t *);
};

const struct tuner VERSIONED(ncclTunerPlugin_v, VERSION) = {
    .name = "recorder",
    .init = tuner_init,
#ifndef NO_FUNCTIONS
    .info = tuner_info,
#endif
    .finalize = tuner_finalize,
    .chunk = tuner_chunk,
};
