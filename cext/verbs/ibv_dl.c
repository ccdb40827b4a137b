#define _GNU_SOURCE
#include "ibv_dl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FORK_UNNEEDED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct vb_library library;
static int loaded;
static char failure[512];

const char *vb_library_name(void)
{
    const char *name = getenv("JAXRL_SYNC_IBVERBS");
    return name && *name ? name : "libibverbs.so.1";
}

/* dlvsym gives an object pointer; memcpy keeps the conversion to a function pointer within the standard. */
static int find(void *handle, const char *symbol, const char *version, void *target)
{
    void *found = dlvsym(handle, symbol, version);
    memcpy(target, &found, sizeof found);
    return found != NULL;
}

static const char *fill(void *handle)
{
#define VB_FIND(name, result, arguments, version)                                                                     \
    if (!find(handle, "ibv_" #name, version, &library.name))                                                          \
        return "ibv_" #name "@" version;
    VB_REQUIRED(VB_FIND)
#undef VB_FIND
#define VB_TRY(name, result, arguments, version) find(handle, "ibv_" #name, version, &library.name);
    VB_OPTIONAL(VB_TRY)
#undef VB_TRY
    return NULL;
}

static int open_library(void)
{
    void *handle = dlopen(vb_library_name(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        snprintf(failure, sizeof failure, "%s", why ? why : vb_library_name());
        return 0;
    }
    const char *missing = fill(handle);
    if (missing) {
        snprintf(failure, sizeof failure, "%s has no symbol %s", vb_library_name(), missing);
        dlclose(handle);
        return 0;
    }
    /* Before any other verb. Kernels from 5.12 copy pinned pages at fork and need none of it. */
    if (!library.is_fork_initialized || library.is_fork_initialized() != FORK_UNNEEDED)
        library.fork_init();
    return 1;
}

const struct vb_library *vb_load(const char **error)
{
    pthread_mutex_lock(&lock);
    if (!loaded)
        loaded = open_library();
    int found = loaded;
    pthread_mutex_unlock(&lock);
    *error = found ? NULL : failure;
    return found ? &library : NULL;
}
