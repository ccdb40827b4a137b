/* MemoryRegion: registered memory. Holds the buffer (or nothing but the registration, for dmabuf) for its life. */
#include "verbs.h"

#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#define SELF(object) ((region_object *)(object))

typedef struct {
    int access, relaxed, fd;
    unsigned long long offset, length, iova;
} request;

/* With relaxed ordering where it is asked for and granted, else without. */
static struct vb_mr *register_host(region_object *self, const request *r)
{
    const struct vb_library *lib = self->owner->lib;
    struct vb_pd *pd = self->owner->pd;
    void *address = self->buffer.buf;
    size_t length = (size_t)self->buffer.len;
    if (r->relaxed && lib->reg_mr_iova2) {
        struct vb_mr *mr = lib->reg_mr_iova2(pd, address, length, self->iova,
                                             (unsigned int)(r->access | VB_ACCESS_RELAXED_ORDERING));
        self->relaxed = mr != NULL;
        if (mr || (errno != EINVAL && errno != EOPNOTSUPP))
            return mr;
        errno = 0;
    }
    return lib->reg_mr(pd, address, length, r->access);
}

static void register_now(region_object *self, const request *r, int *error)
{
    uint64_t before = ns_now();
    self->owner->busy++;
    Py_BEGIN_ALLOW_THREADS
    errno = 0;
    if (r->fd >= 0)
        self->mr = self->owner->lib->reg_dmabuf_mr(self->owner->pd, r->offset, r->length, r->iova, r->fd, r->access);
    else
        self->mr = register_host(self, r);
    *error = errno;
    Py_END_ALLOW_THREADS
    self->owner->busy--;
    self->owner->registration_ns += ns_now() - before;
    self->owner->registrations++;
    self->owner->registered_bytes += self->mr ? self->mr->length : 0;
}

static void explain(region_object *self, module_state *state, const request *r, int error)
{
    struct rlimit limit = {0, 0};
    unsigned long long bytes = r->fd >= 0 ? r->length : (unsigned long long)self->buffer.len;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (error == ENOMEM && r->fd < 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes)
        fail(state, error,
             "registering %llu bytes, but only %llu may be locked (raise it: `ulimit -l unlimited`, LimitMEMLOCK, or "
             "the container's memlock limit)",
             bytes, (unsigned long long)limit.rlim_cur);
    else if (r->fd >= 0)
        fail(state, error, "registering %llu bytes of dmabuf %d%s", bytes, r->fd,
             error == EOPNOTSUPP || error == EPROTONOSUPPORT ? " (the device can't: stage through host memory)" : "");
    else
        fail(state, error, "registering %llu bytes at %p", bytes, self->buffer.buf);
}

static int prepare(region_object *self, module_state *state, PyObject *source, const request *r)
{
    if ((source == Py_None) == (r->fd < 0)) {
        PyErr_SetString(PyExc_ValueError, "give either a buffer or dmabuf_fd");
        return -1;
    }
    if (r->fd >= 0) {
        self->iova = r->iova;
        if (!self->owner->lib->reg_dmabuf_mr) {
            fail(state, EOPNOTSUPP, "this libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 or newer has)");
            return -1;
        }
        uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        if (r->offset % page != r->iova % page) {
            fail(state, EINVAL, "offset %llu and iova 0x%llx of a dmabuf differ within a page of %llu bytes", r->offset,
                 r->iova, (unsigned long long)page);
            return -1;
        }
        return 0;
    }
    if (PyObject_GetBuffer(source, &self->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    self->iova = (uint64_t)(uintptr_t)self->buffer.buf;
    if (self->buffer.len > 0 && (uint64_t)self->buffer.len <= self->owner->limits.max_mr_size)
        return 0;
    fail(state, EINVAL, "registering %lld bytes, the device takes 1 to %llu at once", (long long)self->buffer.len,
         (unsigned long long)self->owner->limits.max_mr_size);
    return -1;
}

static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context",   "buffer", "remote_write", "relaxed_ordering", "dmabuf_fd",
                            "offset",    "length", "iova",         NULL};
    module_state *state = state_of(type);
    PyObject *context, *source = Py_None;
    int remote_write = 0, relaxed = 0;
    request r = {.fd = -1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O$ppiKKK:MemoryRegion", names, state->context, &context,
                                     &source, &remote_write, &relaxed, &r.fd, &r.offset, &r.length, &r.iova) ||
        !still_open(state, ((context_object *)context)->context, "context"))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = alloc(type, 0);
    if (!object)
        return NULL;
    region_object *self = SELF(object);
    self->owner = (context_object *)Py_NewRef(context);
    r.relaxed = relaxed;
    r.access = remote_write ? VB_ACCESS_LOCAL_WRITE | VB_ACCESS_REMOTE_WRITE : VB_ACCESS_LOCAL_WRITE;
    int error = 0;
    if (prepare(self, state, source, &r) < 0)
        goto error;
    register_now(self, &r, &error);
    if (!self->mr) {
        explain(self, state, &r, error);
        goto error;
    }
    if (context_adopt(self->owner, object) < 0)
        goto error;
    return object;
error:
    Py_DECREF(object);
    return NULL;
}

static int release(region_object *self)
{
    int error = 0;
    if (self->mr) {
        error = self->owner->lib->dereg_mr(self->mr);
        self->mr = NULL;
    }
    if (self->buffer.obj)
        PyBuffer_Release(&self->buffer);
    return error;
}

static PyObject *region_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    region_object *self = SELF(object);
    if (!self->mr)
        Py_RETURN_NONE;
    if (check_idle(self, "the memory region") < 0)
        return NULL;
    if (self->in_flight) {
        PyErr_Format(PyExc_BufferError, "%lld batches of work requests still read the memory region",
                     (long long)self->in_flight);
        return NULL;
    }
    int error = release(self);
    if (error)
        return fail(state_of(Py_TYPE(object)), error, "deregistering memory");
    Py_RETURN_NONE;
}

static PyObject *region_repr(PyObject *object)
{
    region_object *self = SELF(object);
    return PyUnicode_FromFormat("<%s MemoryRegion on %U>", self->mr ? "open" : "closed", self->owner->name);
}

static PyObject *get_closed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(SELF(object)->mr == NULL);
}

#define GETTER(name, expression)                                                                                      \
    static PyObject *get_##name(PyObject *object, void *closure)                                                      \
    {                                                                                                                 \
        (void)closure;                                                                                                \
        region_object *self = SELF(object);                                                                           \
        if (!still_open(state_of(Py_TYPE(object)), self->mr, "memory region"))                                        \
            return NULL;                                                                                              \
        return PyLong_FromUnsignedLongLong(expression);                                                               \
    }
GETTER(lkey, self->mr->lkey)
GETTER(rkey, self->mr->rkey)
GETTER(address, self->iova)
GETTER(nbytes, self->mr->length)

static int region_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)SELF(object)->owner);
    Py_VISIT(SELF(object)->buffer.obj);
    return 0;
}

static void region_dealloc(PyObject *object)
{
    region_object *self = SELF(object);
    PyObject_GC_UnTrack(object);
    if (self->mr)
        warn_unclosed("MemoryRegion", self->owner->name);
    if (self->weak_refs)
        PyObject_ClearWeakRefs(object);
    release(self);
    Py_XDECREF((PyObject *)self->owner);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"close", region_close, METH_NOARGS, "Deregister. BufferError while work requests read it."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(region_object, weak_refs), READONLY, NULL},
    {"relaxed_ordering", T_BOOL, offsetof(region_object, relaxed), READONLY, "whether PCIe may reorder writes to it"},
    {"in_flight", T_LONGLONG, offsetof(region_object, in_flight), READONLY, "calls of write that still read it"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"closed", get_closed, NULL, "whether close() was called", NULL},
    {"lkey", get_lkey, NULL, "local key", NULL},
    {"rkey", get_rkey, NULL, "remote key", NULL},
    {"address", get_address, NULL, "address that a peer writes to", NULL},
    {"nbytes", get_nbytes, NULL, "length in bytes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "MemoryRegion(context, buffer): registered memory."},
    {Py_tp_new, (void *)region_new},
    {Py_tp_dealloc, (void *)region_dealloc},
    {Py_tp_traverse, (void *)region_traverse},
    {Py_tp_repr, (void *)region_repr},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec region_spec = {
    .name = "jaxrl_sync.transfer._verbs.MemoryRegion",
    .basicsize = sizeof(region_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
