/* Context: an open device with one protection domain. Parent of regions, completion queues and queue pairs. */
#include "verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>

#define SELF(object) ((context_object *)(object))

int context_adopt(context_object *self, PyObject *child)
{
    PyObject *done = PyObject_CallMethod(self->children, "add", "O", child);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int open_by_name(context_object *self, module_state *state, const char *name)
{
    int count = 0, error = 0, found = 0;
    struct vb_context *context = NULL;
    struct vb_pd *pd = NULL;
    Py_BEGIN_ALLOW_THREADS
    struct vb_device **list = self->lib->get_device_list(&count);
    for (int i = 0; list && i < count && !found; i++)
        if (strcmp(self->lib->get_device_name(list[i]), name) == 0) {
            found = 1;
            errno = 0;
            context = self->lib->open_device(list[i]);
        }
    error = errno;
    if (list)
        self->lib->free_device_list(list);
    if (context) {
        pd = self->lib->alloc_pd(context);
        error = errno;
        fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
    }
    Py_END_ALLOW_THREADS
    self->context = context;
    self->pd = pd;
    if (!found)
        fail(state, ENODEV, "RDMA device %s not found among %d", name, count);
    else if (!context)
        fail(state, error, "opening RDMA device %s", name);
    else if (!pd)
        fail(state, error, "allocating a protection domain on %s", name);
    return pd ? 0 : -1;
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", NULL};
    const char *name;
    module_state *state = state_of(type);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Context", names, &name))
        return NULL;
    const struct vb_library *lib = library_or_fail(state);
    if (!lib)
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = alloc(type, 0);
    if (!object)
        return NULL;
    context_object *self = SELF(object);
    self->lib = lib;
    self->name = PyUnicode_FromString(name);
    self->children = PyObject_CallNoArgs(state->weak_set);
    if (!self->name || !self->children || open_by_name(self, state, name) < 0)
        goto error;
    int rc = lib->query_device(self->context, &self->limits);
    if (rc) {
        fail(state, rc, "querying RDMA device %s", name);
        goto error;
    }
    return object;
error:
    Py_DECREF(object);
    return NULL;
}

static int release(context_object *self)
{
    int error = 0;
    if (self->pd) {
        error = self->lib->dealloc_pd(self->pd);
        self->pd = NULL;
    }
    if (self->context) {
        int rc = self->lib->close_device(self->context) ? errno : 0;
        error = error ? error : rc;
        self->context = NULL;
    }
    return error;
}

/* Queue pairs go before what they use. */
static int close_children(context_object *self, module_state *state)
{
    PyObject *list = PySequence_List(self->children);
    if (!list)
        return -1;
    int ok = 1;
    for (int pass = 0; pass < 2 && ok; pass++)
        for (Py_ssize_t i = 0; i < PyList_Size(list) && ok; i++) {
            PyObject *child = PyList_GetItem(list, i);
            if ((Py_TYPE(child) == state->qp) != (pass == 0))
                continue;
            PyObject *done = PyObject_CallMethod(child, "close", NULL);
            ok = done != NULL;
            Py_XDECREF(done);
        }
    Py_DECREF(list);
    return ok ? 0 : -1;
}

static PyObject *context_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    context_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE(object));
    if (!self->context)
        Py_RETURN_NONE;
    if (check_idle(self, "the context") < 0 || close_children(self, state) < 0)
        return NULL;
    int error = release(self);
    if (error)
        return fail(state, error, "closing RDMA device");
    Py_RETURN_NONE;
}

static PyObject *query_device(PyObject *object, PyObject *unused)
{
    (void)unused;
    context_object *self = SELF(object);
    if (!still_open(state_of(Py_TYPE(object)), self->context, "context"))
        return NULL;
    const struct vb_device_attr *a = &self->limits;
    return Py_BuildValue("{s:N,s:I,s:I,s:K,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "firmware",
                         PyUnicode_FromStringAndSize(a->fw_ver, (Py_ssize_t)strnlen(a->fw_ver, sizeof a->fw_ver)),
                         "vendor_id", a->vendor_id, "vendor_part_id",
                         a->vendor_part_id, "max_mr_size", (unsigned long long)a->max_mr_size, "max_qp", a->max_qp,
                         "max_qp_wr", a->max_qp_wr, "max_sge", a->max_sge, "max_cq", a->max_cq, "max_cqe", a->max_cqe,
                         "max_mr", a->max_mr, "max_qp_rd_atom", a->max_qp_rd_atom, "max_qp_init_rd_atom",
                         a->max_qp_init_rd_atom, "ports", (int)a->phys_port_cnt);
}

static PyObject *query_port(PyObject *object, PyObject *arg)
{
    context_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE(object));
    long port = PyLong_AsLong(arg);
    if ((port == -1 && PyErr_Occurred()) || !still_open(state, self->context, "context"))
        return NULL;
    struct vb_port_attr a;
    memset(&a, 0, sizeof a);
    int rc = self->lib->query_port(self->context, (uint8_t)port, &a);
    if (rc)
        return fail(state, rc, "querying port %ld", port);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "state", a.state, "max_mtu",
                         a.max_mtu, "active_mtu", a.active_mtu, "gid_table", a.gid_tbl_len, "max_message_bytes",
                         a.max_msg_sz, "pkey_table", (int)a.pkey_tbl_len, "lid", (int)a.lid, "sm_lid", (int)a.sm_lid,
                         "active_width", (int)a.active_width, "active_speed", (int)a.active_speed, "phys_state",
                         (int)a.phys_state, "link_layer", (int)a.link_layer, "flags", (int)a.flags);
}

static PyObject *query_gid(PyObject *object, PyObject *args)
{
    context_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE(object));
    int port, index;
    if (!PyArg_ParseTuple(args, "ii:query_gid", &port, &index) || !still_open(state, self->context, "context"))
        return NULL;
    union vb_gid gid;
    memset(&gid, 0, sizeof gid);
    errno = 0;
    if (self->lib->query_gid(self->context, (uint8_t)port, index, &gid))
        return fail(state, errno, "reading GID %d of port %d", index, port);
    return PyBytes_FromStringAndSize((const char *)gid.raw, sizeof gid.raw);
}

static PyObject *query_pkey(PyObject *object, PyObject *args)
{
    context_object *self = SELF(object);
    module_state *state = state_of(Py_TYPE(object));
    int port, index;
    if (!PyArg_ParseTuple(args, "ii:query_pkey", &port, &index) || !still_open(state, self->context, "context"))
        return NULL;
    uint16_t pkey = 0;
    errno = 0;
    if (self->lib->query_pkey(self->context, (uint8_t)port, index, &pkey))
        return fail(state, errno, "reading P_Key %d of port %d", index, port);
    return PyLong_FromLong((long)((pkey >> 8) | ((pkey & 0xff) << 8))); /* big endian in the table */
}

/* One event, acknowledged at once: what names its object is copied out before. Event numbers are of the ABI.
 * 1 got one, 0 none, -1 exception. */
static int take_event(context_object *self, PyObject *list)
{
    struct vb_async_event event;
    memset(&event, 0, sizeof event);
    if (self->lib->get_async_event(self->context, &event))
        return 0;
    const char *kind = "device";
    unsigned long number = 0;
    int type = event.event_type;
    if ((type >= 1 && type <= 7) || type == 16) {
        kind = "qp";
        number = event.element.qp->qp_num;
    } else if (type == 0) {
        kind = "cq";
        number = event.element.cq->handle;
    } else if (type == 14 || type == 15) {
        kind = "srq";
    } else if (type != 8 && type != 19) {
        kind = "port";
        number = (unsigned long)event.element.port_num;
    }
    const char *text = self->lib->event_type_str(type);
    self->lib->ack_async_event(&event);
    PyObject *item = Py_BuildValue("(issk)", type, text, kind, number);
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 1;
}

static PyObject *async_events(PyObject *object, PyObject *args)
{
    context_object *self = SELF(object);
    double timeout_s = 0;
    if (!PyArg_ParseTuple(args, "|d:async_events", &timeout_s) ||
        !still_open(state_of(Py_TYPE(object)), self->context, "context"))
        return NULL;
    PyObject *list = PyList_New(0);
    double end = seconds_now() + timeout_s;
    int got = 0;
    self->busy++; /* throughout: the handler of a signal may close it too */
    while (list) {
        while ((got = take_event(self, list)) > 0)
            continue;
        double left = end - seconds_now();
        if (got < 0 || PyList_Size(list) > 0 || left <= 0)
            break;
        struct pollfd fd = {.fd = self->context->async_fd, .events = POLLIN};
        Py_BEGIN_ALLOW_THREADS
        poll(&fd, 1, left > 0.2 ? 200 : (int)(left * 1000) + 1);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0)
            got = -1;
        if (got < 0)
            break;
    }
    self->busy--;
    if (list && got < 0)
        Py_CLEAR(list);
    return list;
}

/* A descriptor that can't be tells the two apart: a kernel that knows dmabufs says that it is bad. */
static PyObject *dmabuf_supported(PyObject *object, PyObject *unused)
{
    (void)unused;
    context_object *self = SELF(object);
    if (!still_open(state_of(Py_TYPE(object)), self->context, "context"))
        return NULL;
    if (!self->lib->reg_dmabuf_mr)
        Py_RETURN_FALSE;
    errno = 0;
    struct vb_mr *mr = self->lib->reg_dmabuf_mr(self->pd, 0, 4096, 0, -1, VB_ACCESS_LOCAL_WRITE);
    int supported = mr != NULL || errno == EBADF;
    if (mr)
        self->lib->dereg_mr(mr);
    return PyBool_FromLong(supported);
}

static PyObject *get_async_fd(PyObject *object, void *closure)
{
    (void)closure;
    if (!still_open(state_of(Py_TYPE(object)), SELF(object)->context, "context"))
        return NULL;
    return PyLong_FromLong(SELF(object)->context->async_fd);
}

static PyObject *context_repr(PyObject *object)
{
    context_object *self = SELF(object);
    return PyUnicode_FromFormat("<%s Context of %U>", self->context ? "open" : "closed", self->name);
}

static PyObject *get_closed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(SELF(object)->context == NULL);
}

static int context_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(SELF(object)->children);
    return 0;
}

static int context_clear(PyObject *object)
{
    Py_CLEAR(SELF(object)->children);
    return 0;
}

static void context_dealloc(PyObject *object)
{
    context_object *self = SELF(object);
    PyObject_GC_UnTrack(object);
    if (self->context && self->pd)
        warn_unclosed("Context", self->name);
    if (self->weak_refs)
        PyObject_ClearWeakRefs(object);
    context_clear(object);
    release(self);
    Py_CLEAR(self->name);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"close", context_close, METH_NOARGS, "Close children, protection domain and device."},
    {"query_device", query_device, METH_NOARGS, "Limits of the device."},
    {"query_port", query_port, METH_O, "State of one port."},
    {"query_gid", query_gid, METH_VARARGS, "query_gid(port, index): 16 bytes."},
    {"query_pkey", query_pkey, METH_VARARGS, "query_pkey(port, index): the P_Key."},
    {"dmabuf_supported", dmabuf_supported, METH_NOARGS, "dmabuf_supported(): whether the device takes dmabufs."},
    {"async_events", async_events, METH_VARARGS, "async_events(timeout_s=0.0): events since the last call."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(context_object, weak_refs), READONLY, NULL},
    {"name", T_OBJECT, offsetof(context_object, name), READONLY, "the device's name"},
    {"registrations", T_ULONGLONG, offsetof(context_object, registrations), READONLY, "regions registered so far"},
    {"registered_bytes", T_ULONGLONG, offsetof(context_object, registered_bytes), READONLY, "their bytes"},
    {"registration_ns", T_ULONGLONG, offsetof(context_object, registration_ns), READONLY, "time that took"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"closed", get_closed, NULL, "whether close() was called", NULL},
    {"async_fd", get_async_fd, NULL, "readable when async_events() has something", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Context(device): an open RDMA device with one protection domain."},
    {Py_tp_new, (void *)context_new},
    {Py_tp_dealloc, (void *)context_dealloc},
    {Py_tp_traverse, (void *)context_traverse},
    {Py_tp_clear, (void *)context_clear},
    {Py_tp_repr, (void *)context_repr},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec context_spec = {
    .name = "jaxrl_sync.transfer._verbs.Context",
    .basicsize = sizeof(context_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
