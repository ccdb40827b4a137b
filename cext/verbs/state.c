/* States of a queue pair: RESET, INIT, RTR, RTS, ERR, what it was connected with, and its ECE options. */
#include "verbs.h"

#include <errno.h>
#include <string.h>

#define SELF(object) ((qp_object *)(object))

static module_state *state_behind(const qp_object *self)
{
    return state_of(Py_TYPE((PyObject *)self));
}

static int modify(qp_object *self, struct vb_qp_attr *attr, int mask)
{
    int rc;
    self->busy++;
    Py_BEGIN_ALLOW_THREADS
    rc = self->owner->lib->modify_qp(self->qp, attr, mask);
    if (rc < 0) /* some providers answer -1 and set errno */
        rc = errno ? errno : EIO;
    Py_END_ALLOW_THREADS
    self->busy--;
    return rc;
}

PyObject *qp_to_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"port", "pkey_index", NULL};
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    int port = 1, pkey_index = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ii:to_init", names, &port, &pkey_index) ||
        !still_open(state, self->qp, "queue pair"))
        return NULL;
    struct vb_qp_attr attr = {.qp_state = VB_QPS_INIT,
                              .port_num = (uint8_t)port,
                              .pkey_index = (uint16_t)pkey_index,
                              .qp_access_flags = VB_ACCESS_REMOTE_WRITE};
    int rc = modify(self, &attr, VB_QP_STATE | VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_ACCESS_FLAGS);
    if (rc)
        return fail(state, rc, "moving queue pair 0x%06x to INIT (port %d, P_Key index %d)", self->qp_num, port,
                    pkey_index);
    Py_RETURN_NONE;
}

/* The route to a GID. -1 with an exception. */
static int set_route(struct vb_ah_attr *ah, PyObject *gid, int gid_index, int hop_limit, int traffic_class,
                     unsigned int flow_label)
{
    char *raw;
    Py_ssize_t gid_bytes;
    if (PyBytes_AsStringAndSize(gid, &raw, &gid_bytes) < 0)
        return -1;
    if (gid_bytes != sizeof ah->grh.dgid) {
        PyErr_Format(PyExc_ValueError, "a GID has 16 bytes, got %zd", gid_bytes);
        return -1;
    }
    ah->is_global = 1;
    memcpy(ah->grh.dgid.raw, raw, sizeof ah->grh.dgid);
    ah->grh.sgid_index = (uint8_t)gid_index;
    ah->grh.hop_limit = (uint8_t)hop_limit;
    ah->grh.traffic_class = (uint8_t)traffic_class;
    ah->grh.flow_label = flow_label & 0xfffff;
    return 0;
}

PyObject *qp_to_rtr(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"qp_num",    "psn",           "mtu", "port",          "gid",        "gid_index", "lid",
                            "hop_limit", "traffic_class", "sl",  "min_rnr_timer", "flow_label", NULL};
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    unsigned int qp_num, psn, flow_label = 0;
    int mtu, port = 1, gid_index = 0, lid = 0, hop_limit = 64, traffic_class = 0, sl = 0, rnr_timer = 12;
    PyObject *gid = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIi|$iOiiiiiiI:to_rtr", names, &qp_num, &psn, &mtu, &port, &gid,
                                     &gid_index, &lid, &hop_limit, &traffic_class, &sl, &rnr_timer, &flow_label) ||
        !still_open(state, self->qp, "queue pair"))
        return NULL;
    struct vb_qp_attr attr = {.qp_state = VB_QPS_RTR,
                              .path_mtu = mtu,
                              .dest_qp_num = qp_num,
                              .rq_psn = psn & 0xffffff,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = (uint8_t)rnr_timer,
                              .ah_attr = {.dlid = (uint16_t)lid, .sl = (uint8_t)sl, .port_num = (uint8_t)port}};
    if (gid != Py_None && set_route(&attr.ah_attr, gid, gid_index, hop_limit, traffic_class, flow_label) < 0)
        return NULL;
    int rc = modify(self, &attr,
                    VB_QP_STATE | VB_QP_AV | VB_QP_PATH_MTU | VB_QP_DEST_QPN | VB_QP_RQ_PSN |
                        VB_QP_MAX_DEST_RD_ATOMIC | VB_QP_MIN_RNR_TIMER);
    if (rc)
        return fail(state, rc, "moving queue pair 0x%06x to RTR (peer's 0x%06x, MTU code %d, GID index %d, port %d)",
                    self->qp_num, qp_num, mtu, gid_index, port);
    Py_RETURN_NONE;
}

PyObject *qp_to_rts(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"psn", "timeout", "retries", "rnr_retries", NULL};
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    unsigned int psn;
    int timeout = 14, retries = 6, rnr_retries = 6;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I|$iii:to_rts", names, &psn, &timeout, &retries, &rnr_retries) ||
        !still_open(state, self->qp, "queue pair"))
        return NULL;
    struct vb_qp_attr attr = {.qp_state = VB_QPS_RTS,
                              .sq_psn = psn & 0xffffff,
                              .max_rd_atomic = 1,
                              .timeout = (uint8_t)timeout,
                              .retry_cnt = (uint8_t)retries,
                              .rnr_retry = (uint8_t)rnr_retries};
    int rc = modify(self, &attr,
                    VB_QP_STATE | VB_QP_SQ_PSN | VB_QP_MAX_QP_RD_ATOMIC | VB_QP_TIMEOUT | VB_QP_RETRY_CNT |
                        VB_QP_RNR_RETRY);
    if (rc)
        return fail(state, rc, "moving queue pair 0x%06x to RTS (timeout %d, retries %d)", self->qp_num, timeout,
                    retries);
    Py_RETURN_NONE;
}

int qp_to_state(qp_object *self, module_state *state, int target)
{
    struct vb_qp_attr attr = {.qp_state = target};
    int rc = modify(self, &attr, VB_QP_STATE);
    if (rc)
        fail(state, rc, "moving queue pair 0x%06x to %s", self->qp_num, target == VB_QPS_ERR ? "ERR" : "RESET");
    return rc ? -1 : 0;
}

PyObject *qp_to_error(PyObject *object, PyObject *unused)
{
    (void)unused;
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    if (!still_open(state, self->qp, "queue pair") || qp_to_state(self, state, VB_QPS_ERR) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *qp_query(PyObject *object, PyObject *unused)
{
    (void)unused;
    static const char *states[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    if (!still_open(state, self->qp, "queue pair"))
        return NULL;
    struct vb_qp_attr a;
    struct vb_qp_init_attr init;
    memset(&a, 0, sizeof a);
    memset(&init, 0, sizeof init);
    int rc = self->owner->lib->query_qp(self->qp, &a,
                                        VB_QP_STATE | VB_QP_PKEY_INDEX | VB_QP_PORT | VB_QP_PATH_MTU |
                                            VB_QP_TIMEOUT | VB_QP_RETRY_CNT | VB_QP_RNR_RETRY | VB_QP_CAP |
                                            VB_QP_DEST_QPN | VB_QP_AV,
                                        &init);
    if (rc)
        return fail(state, rc > 0 ? rc : errno, "querying queue pair 0x%06x", self->qp_num);
    const char *name = a.qp_state >= 0 && a.qp_state <= VB_QPS_ERR ? states[a.qp_state] : "unknown";
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:I,s:i,s:i,s:i,s:i,s:i,s:I,s:I}", "state", name, "port", (int)a.port_num,
                         "pkey_index", (int)a.pkey_index, "mtu", a.path_mtu, "peer_qp_num", a.dest_qp_num, "timeout",
                         (int)a.timeout, "retries", (int)a.retry_cnt, "rnr_retries", (int)a.rnr_retry,
                         "traffic_class", (int)a.ah_attr.grh.traffic_class, "sl", (int)a.ah_attr.sl, "max_inline",
                         init.cap.max_inline_data, "max_send", init.cap.max_send_wr);
}

/* Whether the answer means that there is no such thing as ECE here. */
static int without_ece(int rc)
{
    return rc == EOPNOTSUPP || rc == ENOSYS || rc == EPROTONOSUPPORT;
}

PyObject *qp_query_ece(PyObject *object, PyObject *unused)
{
    (void)unused;
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    if (!still_open(state, self->qp, "queue pair"))
        return NULL;
    struct vb_ece ece = {0, 0, 0};
    int rc = self->owner->lib->query_ece ? self->owner->lib->query_ece(self->qp, &ece) : EOPNOTSUPP;
    if (without_ece(rc) || (rc == 0 && !ece.vendor_id))
        Py_RETURN_NONE;
    if (rc)
        return fail(state, rc, "querying the ECE options of queue pair 0x%06x", self->qp_num);
    return Py_BuildValue("(III)", ece.vendor_id, ece.options, ece.comp_mask);
}

PyObject *qp_set_ece(PyObject *object, PyObject *args)
{
    qp_object *self = SELF(object);
    module_state *state = state_behind(self);
    struct vb_ece ece;
    if (!PyArg_ParseTuple(args, "III:set_ece", &ece.vendor_id, &ece.options, &ece.comp_mask) ||
        !still_open(state, self->qp, "queue pair"))
        return NULL;
    int rc = self->owner->lib->set_ece ? self->owner->lib->set_ece(self->qp, &ece) : EOPNOTSUPP;
    if (rc && rc != EINVAL && !without_ece(rc)) /* EINVAL: another vendor's; the connection does without */
        return fail(state, rc, "setting the ECE options of queue pair 0x%06x", self->qp_num);
    return PyBool_FromLong(rc == 0);
}
