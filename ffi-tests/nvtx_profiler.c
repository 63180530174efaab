/* A profiler that reads NVTX: appends a line for each range to the file NVTX_TEST_FILE. Types and numbers are those of
 * NVTX 3 (nvtxTypes.h), written anew. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void function_t(void);
typedef function_t *place_t;

struct callbacks {
    size_t size;
    int (*module_functions)(int module, place_t ***table, unsigned *count);
};
struct version_info {
    size_t size;
    uint32_t version, reserved;
    void (*set_version)(uint32_t version);
};
struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
};

static char domain[64];
static int depth;

static void write_line(const char *text) {
    FILE *file = fopen(getenv("NVTX_TEST_FILE"), "a");
    if (file == NULL) abort();
    fputs(text, file);
    fclose(file);
}

static void *create_domain(const char *name) {
    snprintf(domain, sizeof domain, "%s", name);
    return domain;
}

static int push(void *of, const struct attributes *range) {
    char line[512];
    if (of != domain || range->version != 3 || range->size != sizeof *range || range->message_type != 1) abort();
    snprintf(line, sizeof line, "%d push %s %d %llu %s\n", (int)getpid(), domain, (int)range->payload_type,
             (unsigned long long)range->payload, range->message);
    write_line(line);
    return depth++;
}

static int pop(void *of) {
    char line[64];
    if (of != domain || depth == 0) abort();
    snprintf(line, sizeof line, "%d pop\n", (int)getpid());
    write_line(line);
    return --depth;
}

static void ignore(void) {}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t number)) {
    const struct callbacks *callbacks = export_table(1);
    const struct version_info *version = export_table(3);
    int module;
    if (callbacks == NULL || callbacks->size < sizeof *callbacks) return 0;
    if (version == NULL || version->version < 3) return 0;
    version->set_version(3);
    /* Profilers attach to every function of every module. */
    for (module = 1; module <= 6; module++) {
        place_t **table = NULL;
        unsigned count = 0, at;
        if (!callbacks->module_functions(module, &table, &count) || table == NULL || count < 7) return 0;
        for (at = 1; at < count; at++) *table[at] = ignore;
        if (module != 5) continue;
        *table[4] = (function_t *)push;
        *table[5] = (function_t *)pop;
        *table[12] = (function_t *)create_domain;
    }
    return callbacks->module_functions(7, NULL, NULL) == 0;
}
