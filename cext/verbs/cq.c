/* CompletionQueue: completions as packed records, each exactly once, and waiting with a deadline.
 *
 * It never overruns: a queue pair reserves as many entries as it can have work requests in flight. */
#include "verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define SELF(object) ((cq_object *)(object))
enum { POLL_BATCH = 64 };

static int create(cq_object *self, module_state *state, int depth)
{
    const struct vb_library *lib = self->owner->lib;
    int error = 0;
    self->owner->busy++;
    Py_BEGIN_ALLOW_THREADS
    errno = 0;
    self->channel = lib->create_comp_channel(self->owner->context);
    if (self->channel) {
        fcntl(self->channel->fd, F_SETFL, fcntl(self->channel->fd, F_GETFL) | O_NONBLOCK);
        self->cq = lib->create_cq(self->owner->context, depth, NULL, self->channel, 0);
    }
    error = errno;
    Py_END_ALLOW_THREADS
    self->owner->busy--;
    if (!self->cq)
        fail(state, error, "creating a completion %s", self->channel ? "queue (is memlock too low?)" : "channel");
    return self->cq ? 0 : -1;
}

static PyObject *cq_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context", "depth", NULL};
    module_state *state = state_of(type);
    PyObject *context;
    int depth;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!i:CompletionQueue", names, state->context, &context, &depth) ||
        !still_open(state, ((context_object *)context)->context, "context"))
        return NULL;
    if (depth < 1 || depth > ((context_object *)context)->limits.max_cqe)
        return fail(state, EINVAL, "a completion queue of %d entries, the device takes 1 to %d", depth,
                    ((context_object *)context)->limits.max_cqe);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = alloc(type, 0);
    if (!object)
        return NULL;
    cq_object *self = SELF(object);
    self->owner = (context_object *)Py_NewRef(context);
    if (create(self, state, depth) < 0 || context_adopt(self->owner, object) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    self->depth = self->cq->cqe;
    return object;
}

int cq_attach(cq_object *self, qp_object *qp)
{
    if (self->qp_count == self->qp_room) {
        size_t room = self->qp_room ? 2 * self->qp_room : 8;
        qp_object **grown = PyMem_Realloc(self->qps, room * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return -1;
        }
        self->qps = grown;
        self->qp_room = room;
    }
    self->qps[self->qp_count++] = qp;
    return 0;
}

void cq_detach(cq_object *self, qp_object *qp)
{
    for (size_t i = 0; i < self->qp_count; i++)
        if (self->qps[i] == qp) {
            self->qps[i] = self->qps[--self->qp_count];
            return;
        }
}

static int keep(cq_object *self, const record *r)
{
    if (self->first && self->first + self->held == self->backlog_room) {
        memmove(self->backlog, self->backlog + self->first, self->held * sizeof *self->backlog);
        self->first = 0;
    }
    if (self->held == self->backlog_room) {
        size_t room = self->backlog_room ? 2 * self->backlog_room : POLL_BATCH;
        record *grown = PyMem_Realloc(self->backlog, room * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return -1;
        }
        self->backlog = grown;
        self->backlog_room = room;
    }
    self->backlog[self->first + self->held++] = *r;
    return 0;
}

static qp_object *by_number(const cq_object *self, uint32_t number)
{
    for (size_t i = 0; i < self->qp_count; i++)
        if (self->qps[i]->qp_num == number)
            return self->qps[i];
    return NULL;
}

/* Polls until there is at least one record or the device has no more; at most `room`. -1 with an exception. */
static int take(cq_object *self, record *out, int room)
{
    struct vb_wc wcs[POLL_BATCH];
    int got, kept = 0;
    do {
        memset(wcs, 0, sizeof wcs); /* not every provider fills every field of an error */
        got = self->owner->context->ops.poll_cq(self->cq, room < POLL_BATCH ? room : POLL_BATCH, wcs);
        if (got < 0 || got > POLL_BATCH) {
            fail(state_of(Py_TYPE((PyObject *)self)), got < 0 ? -got : EIO, "polling a completion queue");
            return -1;
        }
        for (int i = 0; i < got; i++) {
            qp_object *qp = by_number(self, wcs[i].qp_num);
            if (qp && qp_account(qp, &wcs[i], &out[kept])) {
                kept++;
                self->errors += wcs[i].status != VB_WC_SUCCESS;
                self->by_status[out[kept - 1].status < VB_WC_STATUS_COUNT ? wcs[i].status : VB_WC_GENERAL_ERR]++;
            } else {
                self->strays++;
            }
        }
        self->polled += (uint64_t)got;
    } while (got && !kept);
    return kept;
}

int cq_collect(cq_object *self, qp_object *closing)
{
    record fresh[POLL_BATCH];
    int total = 0, got;
    while ((got = take(self, fresh, POLL_BATCH)) > 0) {
        for (int i = 0; i < got; i++) {
            if (closing && fresh[i].token == closing->token && fresh[i].status == VB_WC_WR_FLUSH_ERR)
                continue; /* counted in the queue pair's `flushed`; its owner asked for it */
            if (keep(self, &fresh[i]) < 0)
                return -1;
        }
        total += got;
    }
    return got < 0 ? -1 : total;
}

static int has_room(Py_buffer *out, PyObject *target)
{
    if (PyObject_GetBuffer(target, out, PyBUF_WRITABLE) < 0)
        return 0;
    if (out->len >= (Py_ssize_t)sizeof(record) && (uintptr_t)out->buf % _Alignof(record) == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "completions go into an aligned buffer of at least %zu bytes, got %zd",
                 sizeof(record), out->len);
    PyBuffer_Release(out);
    return 0;
}

static PyObject *cq_poll(PyObject *object, PyObject *target)
{
    cq_object *self = SELF(object);
    Py_buffer out;
    if (!still_open(state_of(Py_TYPE(object)), self->cq, "completion queue") || !has_room(&out, target))
        return NULL;
    record *records = out.buf;
    size_t room = (size_t)out.len / sizeof(record), count = self->held < room ? self->held : room;
    if (count) /* without a backlog its memory may be NULL */
        memcpy(records, self->backlog + self->first, count * sizeof(record));
    self->held -= count;
    self->first = self->held ? self->first + count : 0;
    int got = 0;
    while (count < room) {
        size_t left = room - count;
        got = take(self, records + count, left > POLL_BATCH ? POLL_BATCH : (int)left);
        if (got <= 0)
            break;
        count += (size_t)got;
    }
    PyBuffer_Release(&out);
    if (got < 0 && count == 0)
        return NULL;
    PyErr_Clear(); /* what was taken must reach the caller; the next poll says the same again */
    return PyLong_FromSize_t(count);
}

/* Sleeps until an event or for 200 ms at most, the GIL released, and acknowledges what came. */
static void sleep_on_channel(cq_object *self, double left_s)
{
    const struct vb_library *lib = self->owner->lib;
    struct pollfd fd = {.fd = self->channel->fd, .events = POLLIN};
    Py_BEGIN_ALLOW_THREADS
    struct vb_cq *cq;
    void *user;
    if (poll(&fd, 1, left_s > 0.2 ? 200 : (int)(left_s * 1000) + 1) > 0 &&
        lib->get_cq_event(self->channel, &cq, &user) == 0)
        lib->ack_cq_events(cq, 1);
    Py_END_ALLOW_THREADS
}

/* Looks without sleeping for `spin_s`, other threads run between looks; 1 as soon as there is something, -1 with
 * an exception. */
static int spin(cq_object *self, double spin_s)
{
    double end = seconds_now() + spin_s;
    for (;;) {
        if (!self->held && cq_collect(self, NULL) < 0)
            return -1;
        if (self->held || seconds_now() >= end)
            return self->held > 0;
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
    }
}

/* 1 something to poll, 0 the time is over, -1 exception. */
static int wait_until(cq_object *self, double timeout_s, double spin_s)
{
    double end = seconds_now() + timeout_s;
    int found = spin(self, spin_s < timeout_s ? spin_s : timeout_s);
    while (!found) {
        /* Arm first and look again: what came in between would raise no event. */
        int rc = self->owner->context->ops.req_notify_cq(self->cq, 0);
        if (rc) {
            fail(state_of(Py_TYPE((PyObject *)self)), rc, "arming a completion queue");
            return -1;
        }
        found = spin(self, 0);
        double left = end - seconds_now();
        if (found || left <= 0)
            break;
        sleep_on_channel(self, left);
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
    return found;
}

static PyObject *cq_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout_s", "spin_s", NULL};
    cq_object *self = SELF(object);
    double timeout_s, spin_s = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|d:wait", names, &timeout_s, &spin_s) ||
        !still_open(state_of(Py_TYPE(object)), self->cq, "completion queue"))
        return NULL;
    self->busy++; /* throughout: the handler of a signal may close it too */
    int found = wait_until(self, timeout_s, spin_s);
    self->busy--;
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *cq_statuses(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *found = PyDict_New();
    for (int status = 0; found && status < VB_WC_STATUS_COUNT; status++) {
        if (!SELF(object)->by_status[status])
            continue;
        PyObject *key = PyLong_FromLong(status);
        PyObject *count = PyLong_FromUnsignedLongLong(SELF(object)->by_status[status]);
        if (!key || !count || PyDict_SetItem(found, key, count) < 0)
            Py_CLEAR(found);
        Py_XDECREF(key);
        Py_XDECREF(count);
    }
    return found;
}

static int release(cq_object *self)
{
    int error = 0;
    if (self->cq) {
        error = self->owner->lib->destroy_cq(self->cq);
        self->cq = NULL;
    }
    if (self->channel) {
        int rc = self->owner->lib->destroy_comp_channel(self->channel);
        error = error ? error : rc;
        self->channel = NULL;
    }
    return error;
}

static PyObject *cq_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    cq_object *self = SELF(object);
    if (!self->cq)
        Py_RETURN_NONE;
    if (check_idle(self, "the completion queue") < 0)
        return NULL;
    while (self->qp_count) {
        PyObject *qp = Py_NewRef((PyObject *)self->qps[self->qp_count - 1]);
        PyObject *done = PyObject_CallMethod(qp, "close", NULL);
        Py_DECREF(qp);
        if (!done)
            return NULL;
        Py_DECREF(done);
    }
    int error = release(self);
    if (error)
        return fail(state_of(Py_TYPE(object)), error, "destroying a completion queue");
    Py_RETURN_NONE;
}

static PyObject *cq_repr(PyObject *object)
{
    cq_object *self = SELF(object);
    return PyUnicode_FromFormat("<%s CompletionQueue on %U>", self->cq ? "open" : "closed", self->owner->name);
}

static PyObject *get_closed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(SELF(object)->cq == NULL);
}

static int cq_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)SELF(object)->owner);
    return 0;
}

static void cq_dealloc(PyObject *object)
{
    cq_object *self = SELF(object);
    PyObject_GC_UnTrack(object);
    if (self->cq)
        warn_unclosed("CompletionQueue", self->owner->name);
    if (self->weak_refs)
        PyObject_ClearWeakRefs(object);
    release(self); /* no queue pair is left: each holds a reference */
    PyMem_Free(self->qps);
    PyMem_Free(self->backlog);
    Py_XDECREF((PyObject *)self->owner);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"close", cq_close, METH_NOARGS, "Close the queue pairs that use it, then destroy it."},
    {"poll", cq_poll, METH_O, "poll(out): fill `out` with records; returns how many."},
    {"wait", (PyCFunction)(void (*)(void))cq_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(timeout_s, spin_s=0.0): whether there is something to poll."},
    {"statuses", cq_statuses, METH_NOARGS, "statuses(): how many completions of each status."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cq_object, weak_refs), READONLY, NULL},
    {"depth", T_LONGLONG, offsetof(cq_object, depth), READONLY, "entries granted"},
    {"reserved", T_LONGLONG, offsetof(cq_object, reserved), READONLY, "entries that queue pairs may need"},
    {"polled", T_ULONGLONG, offsetof(cq_object, polled), READONLY, "completions taken from the device"},
    {"errors", T_ULONGLONG, offsetof(cq_object, errors), READONLY, "those without success, flushes too"},
    {"strays", T_ULONGLONG, offsetof(cq_object, strays), READONLY, "completions of nothing in flight, dropped"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"closed", get_closed, NULL, "whether close() was called", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "CompletionQueue(context, depth): completions of the queue pairs attached to it."},
    {Py_tp_new, (void *)cq_new},
    {Py_tp_dealloc, (void *)cq_dealloc},
    {Py_tp_traverse, (void *)cq_traverse},
    {Py_tp_repr, (void *)cq_repr},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec cq_spec = {
    .name = "jaxrl_sync.transfer._verbs.CompletionQueue",
    .basicsize = sizeof(cq_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
