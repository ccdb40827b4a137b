/* QueuePair: a reliable connection. Posts batches of RDMA WRITEs, counts what is in flight, recovers from errors.
 *
 * Work requests are numbered 1, 2, ... per direction; the number is the wr_id (receives have the top bit set), so
 * a completion is told from a late or a second one, and credits can't be lost. */
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#define SELF(object) ((qp_object *)(object))

static PyTypeObject *type_of(const qp_object *self)
{
    return Py_TYPE((PyObject *)self);
}

static uint64_t in_flight(const qp_object *self)
{
    return self->posted - self->retired + self->recv_posted - self->recv_retired;
}

static int create(qp_object *self, module_state *state, uint32_t inline_bytes)
{
    const struct vb_library *lib = self->owner->lib;
    struct vb_qp_init_attr attr = {
        .send_cq = self->cq->cq, .recv_cq = self->cq->cq, .cap = {self->max_send, self->max_recv, 1, 1, inline_bytes},
        .qp_type = VB_QPT_RC};
    int error = 0;
    self->owner->busy++;
    Py_BEGIN_ALLOW_THREADS
    errno = 0;
    self->qp = lib->create_qp(self->owner->pd, &attr);
    if (!self->qp && inline_bytes) { /* some providers refuse inline data altogether */
        attr.cap = (struct vb_qp_cap){self->max_send, self->max_recv, 1, 1, 0};
        self->qp = lib->create_qp(self->owner->pd, &attr);
    }
    error = errno;
    Py_END_ALLOW_THREADS
    self->owner->busy--;
    if (!self->qp) {
        fail(state, error, "creating a queue pair of %u sends and %u receives%s", self->max_send, self->max_recv,
             error == ENOMEM ? " (is memlock too low?)" : "");
        return -1;
    }
    self->qp_num = self->qp->qp_num;
    self->max_inline = attr.cap.max_inline_data; /* more depth may be granted too, but the queue has no room for it */
    return 0;
}

static int reserve(qp_object *self, module_state *state)
{
    uint32_t most = (uint32_t)self->owner->limits.max_qp_wr;
    int64_t wanted = (int64_t)self->max_send + self->max_recv;
    if (!self->max_send || self->max_send > most || self->max_recv > most) {
        fail(state, EINVAL, "a queue pair of %u sends and %u receives, the device takes 1 to %u", self->max_send,
             self->max_recv, most);
        return -1;
    }
    if (self->cq->reserved + wanted > self->cq->depth) {
        fail(state, ENOSPC, "a queue pair may need %lld completion entries, its queue has %lld of %lld left",
             (long long)wanted, (long long)(self->cq->depth - self->cq->reserved), (long long)self->cq->depth);
        return -1;
    }
    self->opcodes = PyMem_Calloc(self->max_send, sizeof *self->opcodes);
    self->batches = PyMem_Calloc(self->max_send, sizeof *self->batches);
    if (self->opcodes && self->batches)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static PyObject *qp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context", "cq", "max_send", "max_recv", "max_inline", "max_message_bytes", "peer", NULL};
    module_state *state = state_of(type);
    PyObject *context, *cq, *peer = NULL;
    unsigned int max_send = 128, max_recv = 128, max_inline = 64, max_message = 1u << 30;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|$IIIIU:QueuePair", names, state->context, &context, state->cq,
                                     &cq, &max_send, &max_recv, &max_inline, &max_message, &peer) ||
        !still_open(state, ((context_object *)context)->context, "context") ||
        !still_open(state, ((cq_object *)cq)->cq, "completion queue"))
        return NULL;
    if (((cq_object *)cq)->owner != (context_object *)context) {
        PyErr_SetString(PyExc_ValueError, "the completion queue belongs to another context");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = alloc(type, 0);
    if (!object)
        return NULL;
    qp_object *self = SELF(object);
    self->owner = (context_object *)Py_NewRef(context);
    self->cq = (cq_object *)Py_NewRef(cq);
    self->peer = peer ? Py_NewRef(peer) : PyUnicode_FromString("?");
    self->token = state->next_token++;
    self->max_send = max_send;
    self->max_recv = max_recv;
    self->max_message = max_message;
    if (!self->peer || reserve(self, state) < 0 || create(self, state, max_inline) < 0)
        goto error;
    self->cq->reserved += (int64_t)max_send + max_recv;
    if (cq_attach(self->cq, self) < 0 || context_adopt(self->owner, object) < 0)
        goto error;
    return object;
error:
    Py_DECREF(object);
    return NULL;
}

/* ---- accounting -------------------------------------------------------------------------------------------- */

void qp_count_ns(uint64_t *histogram, uint64_t ns)
{
    int log2 = ns ? 63 - __builtin_clzll(ns) : 0;
    histogram[log2 < HISTOGRAM ? log2 : HISTOGRAM - 1]++;
}

void qp_release_batches(qp_object *self, uint64_t up_to)
{
    uint64_t now = 0;
    while (self->batch_count && self->batches[self->batch_first].last <= up_to) {
        region_object *region = self->batches[self->batch_first].region;
        now = now ? now : ns_now();
        qp_count_ns(self->done_ns, now - self->batches[self->batch_first].posted_ns);
        self->batch_first = (self->batch_first + 1) % self->max_send;
        self->batch_count--;
        region->in_flight--;
        Py_DECREF((PyObject *)region);
    }
}

int qp_account(qp_object *self, const struct vb_wc *wc, record *out)
{
    int receive = (wc->wr_id & QP_RECEIVE) != 0;
    uint64_t seq = wc->wr_id & ~QP_RECEIVE;
    uint64_t *retired = receive ? &self->recv_retired : &self->retired;
    if (seq <= *retired || seq > (receive ? self->recv_posted : self->posted))
        return 0;
    int good = wc->status == VB_WC_SUCCESS;
    *out = (record){
        .token = self->token,
        .seq = seq,
        .qp_num = self->qp_num,
        .status = (uint32_t)wc->status,
        .opcode = receive ? good ? (uint32_t)wc->opcode : VB_WC_RECV : self->opcodes[seq % self->max_send],
        .byte_len = good && receive ? wc->byte_len : 0,
        .imm = good && receive && (wc->wc_flags & VB_WC_WITH_IMM) ? ntohl(wc->imm_data) : 0,
        .vendor_err = good ? 0 : wc->vendor_err,
        .retires = (uint32_t)(seq - *retired),
        .receive = (uint32_t)receive,
    };
    *retired = seq;
    if (wc->status == VB_WC_WR_FLUSH_ERR)
        self->flushed++;
    else if (!good)
        self->failed++;
    if (!receive)
        qp_release_batches(self, seq);
    return 1;
}

/* Until nothing is in flight or the time is over; completions go to the queue's backlog. */
static int drain(qp_object *self, double timeout_s)
{
    double end = seconds_now() + timeout_s;
    int rc;
    self->busy++; /* throughout: the handler of a signal may close it too */
    while ((rc = cq_collect(self->cq, self)) >= 0 && in_flight(self) && seconds_now() < end) {
        Py_BEGIN_ALLOW_THREADS
        usleep(200);
        Py_END_ALLOW_THREADS
        rc = PyErr_CheckSignals();
        if (rc < 0)
            break;
    }
    self->busy--;
    return rc < 0 ? -1 : 0;
}

/* What is still in flight will never complete: count it and let its memory go. */
static void write_off(qp_object *self)
{
    self->lost += in_flight(self);
    self->retired = self->posted;
    self->recv_retired = self->recv_posted;
    qp_release_batches(self, self->posted);
}

static PyObject *qp_reset(PyObject *object, PyObject *args)
{
    qp_object *self = SELF(object);
    module_state *state = state_of(type_of(self));
    double timeout_s = 2;
    if (!PyArg_ParseTuple(args, "|d:reset", &timeout_s) || !still_open(state, self->qp, "queue pair") ||
        check_idle(self, "the queue pair") < 0)
        return NULL;
    uint64_t before = self->lost;
    if ((in_flight(self) && (qp_to_state(self, state, VB_QPS_ERR) < 0 || drain(self, timeout_s) < 0)) ||
        qp_to_state(self, state, VB_QPS_RESET) < 0)
        return NULL;
    write_off(self);
    return PyLong_FromUnsignedLongLong(self->lost - before);
}

/* ---- the object -------------------------------------------------------------------------------------------- */

static int release(qp_object *self)
{
    int error = 0;
    if (self->qp) {
        error = self->owner->lib->destroy_qp(self->qp);
        self->qp = NULL;
        cq_detach(self->cq, self);
        self->cq->reserved -= (int64_t)self->max_send + self->max_recv;
    }
    if (self->batches)
        write_off(self);
    return error;
}

static PyObject *qp_close(PyObject *object, PyObject *args)
{
    qp_object *self = SELF(object);
    module_state *state = state_of(type_of(self));
    double timeout_s = 2;
    if (!PyArg_ParseTuple(args, "|d:close", &timeout_s))
        return NULL;
    if (!self->qp)
        Py_RETURN_NONE;
    if (check_idle(self, "the queue pair") < 0)
        return NULL;
    /* Destroying it at once would drop completions; a refused ERR must not keep it alive. */
    if (in_flight(self)) {
        if (qp_to_state(self, state, VB_QPS_ERR) < 0)
            PyErr_Clear();
        else if (drain(self, timeout_s) < 0)
            return NULL;
    }
    int error = release(self);
    if (error)
        return fail(state, error, "destroying queue pair 0x%06x", self->qp_num);
    Py_RETURN_NONE;
}

static PyObject *qp_repr(PyObject *object)
{
    qp_object *self = SELF(object);
    return PyUnicode_FromFormat("<%s QueuePair 0x%x on %U to %U>", self->qp ? "open" : "closed", self->qp_num,
                                self->owner->name, self->peer);
}

/* Up to the last entry that isn't zero. */
static PyObject *histogram_list(const uint64_t *counts)
{
    Py_ssize_t used = HISTOGRAM;
    while (used && !counts[used - 1])
        used--;
    PyObject *list = PyList_New(used);
    for (Py_ssize_t i = 0; list && i < used; i++)
        if (PyList_SetItem(list, i, PyLong_FromUnsignedLongLong(counts[i])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *qp_latency(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("{s:N,s:N}", "post", histogram_list(SELF(object)->post_ns), "done",
                         histogram_list(SELF(object)->done_ns));
}

static PyObject *get_closed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(SELF(object)->qp == NULL);
}

static PyObject *get_in_flight(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(SELF(object)->posted - SELF(object)->retired);
}

static PyObject *get_receives(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(SELF(object)->recv_posted - SELF(object)->recv_retired);
}

static int qp_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)SELF(object)->owner);
    Py_VISIT((PyObject *)SELF(object)->cq);
    return 0;
}

static void qp_dealloc(PyObject *object)
{
    qp_object *self = SELF(object);
    PyObject_GC_UnTrack(object);
    if (self->qp)
        warn_unclosed("QueuePair", self->owner->name);
    if (self->weak_refs)
        PyObject_ClearWeakRefs(object);
    release(self);
    PyMem_Free(self->opcodes);
    PyMem_Free(self->batches);
    Py_XDECREF(self->peer);
    Py_XDECREF((PyObject *)self->cq);
    Py_XDECREF((PyObject *)self->owner);
    free_object(object);
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"to_init", KEYWORDS(qp_to_init), "RESET to INIT."},
    {"to_rtr", KEYWORDS(qp_to_rtr), "INIT to RTR: ready to receive."},
    {"to_rts", KEYWORDS(qp_to_rts), "RTR to RTS: ready to send."},
    {"to_error", qp_to_error, METH_NOARGS, "To ERR: everything in flight is flushed."},
    {"query", qp_query, METH_NOARGS, "query(): the state and what it was connected with."},
    {"query_ece", qp_query_ece, METH_NOARGS, "query_ece(): (vendor, options, mask) or None."},
    {"set_ece", qp_set_ece, METH_VARARGS, "set_ece(vendor, options, mask): whether the device takes them."},
    {"latency", qp_latency, METH_NOARGS, "latency(): histograms of doorbells and of batches."},
    {"reset", qp_reset, METH_VARARGS, "reset(timeout_s=2.0): drain, then RESET; returns what never completed."},
    {"write", KEYWORDS(qp_write), "Post RDMA WRITEs; returns how many entries were accepted."},
    {"receive", qp_receive, METH_O, "receive(count): post receives for immediates; returns how many."},
    {"close", qp_close, METH_VARARGS, "close(timeout_s=2.0): drain, then destroy."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define MEMBER(name, kind, text) {#name, kind, offsetof(qp_object, name), READONLY, text}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(qp_object, weak_refs), READONLY, NULL},
    MEMBER(qp_num, T_UINT, "number that the peer sends to"),
    MEMBER(token, T_ULONGLONG, "names this queue pair in records; never used twice in a process"),
    MEMBER(peer, T_OBJECT, "name of the other side, for messages"),
    MEMBER(max_send, T_UINT, "work requests that may be in flight"),
    MEMBER(max_recv, T_UINT, "receives that may be posted"),
    MEMBER(max_inline, T_UINT, "bytes that travel inside a work request"),
    MEMBER(max_message, T_UINT, "bytes of one message at most"),
    MEMBER(posted, T_ULONGLONG, "number of the last work request accepted"),
    MEMBER(retired, T_ULONGLONG, "number of the last work request accounted for"),
    MEMBER(failed, T_ULONGLONG, "error completions other than flushes"),
    MEMBER(flushed, T_ULONGLONG, "work requests flushed after an error"),
    MEMBER(lost, T_ULONGLONG, "work requests that never completed"),
    MEMBER(post_calls, T_ULONGLONG, "doorbells"),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"closed", get_closed, NULL, "whether close() was called", NULL},
    {"in_flight", get_in_flight, NULL, "work requests not yet accounted for", NULL},
    {"receives", get_receives, NULL, "receives posted and unused", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "QueuePair(context, cq): a reliable connection."},
    {Py_tp_new, (void *)qp_new},
    {Py_tp_dealloc, (void *)qp_dealloc},
    {Py_tp_traverse, (void *)qp_traverse},
    {Py_tp_repr, (void *)qp_repr},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec qp_spec = {
    .name = "jaxrl_sync.transfer._verbs.QueuePair",
    .basicsize = sizeof(qp_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
