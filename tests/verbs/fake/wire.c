/* The data path of the fake: posting, executing, completing. */
#include "fake.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { LOC_PROT = 4, REM_ACCESS = 10, RETRY_EXC = 12, RNR_EXC = 13 };

static uint32_t draw(void)
{
    uint64_t x = fake_knobs.seed + UINT64_C(0x9E3779B97F4A7C15);
    fake_knobs.seed = x;
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)(x >> 33);
}

static int chance(uint32_t of_65536)
{
    return of_65536 && (draw() & 0xffff) < of_65536;
}

static void push(struct vb_cq *target, const struct vb_wc *wc)
{
    struct cq *cq = (struct cq *)target;
    if (cq->held == cq->base.cqe) {
        fake_counts.overruns++;
        return;
    }
    cq->wcs[(cq->first + cq->held++) % cq->base.cqe] = *wc;
    if (cq->armed && target->channel) {
        cq->armed = 0;
        if (write(target->channel->refcnt, &target, sizeof target) < 0)
            fake_counts.overruns++;
    }
}

static void deliver(struct vb_cq *cq, const struct vb_wc *wc)
{
    push(cq, wc);
    if (chance(fake_knobs.chance_duplicate) && ((struct cq *)cq)->held < cq->cqe)
        push(cq, wc);
}

/* What is late stays behind what is late already: a queue pair keeps its order, others overtake it. */
static void complete(struct qp *qp, struct vb_wc wc)
{
    if (qp->late_count == qp->late_room || (!qp->late_count && !chance(fake_knobs.chance_late))) {
        deliver(qp->base.send_cq, &wc);
        return;
    }
    qp->late[(qp->first_late + qp->late_count++) % qp->late_room] = wc;
}

/* Some of what is late, all of it once lateness is switched off. */
static void deliver_late(struct qp *qp)
{
    while (qp->late_count && !chance(fake_knobs.chance_late)) {
        deliver(qp->base.send_cq, &qp->late[qp->first_late]);
        qp->first_late = (qp->first_late + 1) % qp->late_room;
        qp->late_count--;
    }
}

void fake_flush(struct qp *qp)
{
    qp->base.state = VB_QPS_ERR;
    if (fake_knobs.lossy_reset) {
        qp->send_count = qp->receive_count = 0;
        return;
    }
    for (; qp->send_count; qp->send_count--) {
        complete(qp, (struct vb_wc){.wr_id = qp->sends[qp->first_send].wr.wr_id,
                                                  .status = VB_WC_WR_FLUSH_ERR,
                                                  .opcode = 77, /* without meaning: nobody may believe it */
                                                  .qp_num = qp->base.qp_num});
        qp->first_send = (qp->first_send + 1) % qp->max_send;
    }
    for (; qp->receive_count; qp->receive_count--) {
        complete(qp, (struct vb_wc){.wr_id = qp->receives[qp->first_receive],
                                                  .status = VB_WC_WR_FLUSH_ERR,
                                                  .opcode = 77,
                                                  .qp_num = qp->base.qp_num});
        qp->first_receive = (qp->first_receive + 1) % qp->max_recv;
    }
}

static struct qp *by_number(uint32_t number)
{
    for (struct qp *qp = fake_qps; qp; qp = qp->next)
        if (qp->base.qp_num == number)
            return qp;
    return NULL;
}

static uint8_t *resolve(uint64_t addr, uint64_t length, uint32_t key, int access)
{
    for (struct mr *mr = fake_mrs; mr; mr = mr->next)
        if (mr->base.lkey == key && (mr->access & access) == access && addr >= mr->iova &&
            length <= mr->base.length && addr - mr->iova <= mr->base.length - length)
            return (uint8_t *)mr->base.addr + (addr - mr->iova);
    return NULL;
}

/* Moves the bytes; a status, or -1: not ready, try later. */
static int execute(struct qp *qp, struct pending *p)
{
    const struct vb_send_wr *wr = &p->wr;
    struct qp *peer = by_number(qp->remote);
    uint64_t length = wr->num_sge ? p->sge.length : 0;
    const uint8_t *from = p->inlined;
    uint8_t *to = NULL;
    if (fake_knobs.fail_at && ++fake_counts.executed == fake_knobs.fail_at)
        return (int)fake_knobs.fail_status;
    if (length && !(wr->send_flags & VB_SEND_INLINE) &&
        !(from = resolve(p->sge.addr, length, p->sge.lkey, VB_ACCESS_LOCAL_WRITE)))
        return LOC_PROT;
    if (!peer || peer->dead || peer->base.state < VB_QPS_RTR || peer->base.state > VB_QPS_RTS)
        return RETRY_EXC;
    if (length && !(to = resolve(wr->wr.rdma.remote_addr, length, wr->wr.rdma.rkey, VB_ACCESS_REMOTE_WRITE)))
        return REM_ACCESS;
    if (wr->opcode == VB_WR_RDMA_WRITE_WITH_IMM && (!peer->receive_count || chance(fake_knobs.chance_rnr))) {
        fake_counts.executed -= fake_knobs.fail_at != 0;
        if (qp->rnr_retry == 7 || qp->rnr_tries++ < 20 * (qp->rnr_retry + 1))
            return -1;
        return RNR_EXC;
    }
    qp->rnr_tries = 0;
    if (length)
        memcpy(to, from, length);
    if (wr->opcode == VB_WR_RDMA_WRITE_WITH_IMM) {
        complete(peer, (struct vb_wc){.wr_id = peer->receives[peer->first_receive],
                                                    .opcode = VB_WC_RECV_RDMA_WITH_IMM,
                                                    .byte_len = (uint32_t)length,
                                                    .imm_data = wr->imm_data,
                                                    .wc_flags = VB_WC_WITH_IMM,
                                                    .qp_num = peer->base.qp_num,
                                                    .src_qp = qp->base.qp_num});
        peer->first_receive = (peer->first_receive + 1) % peer->max_recv;
        peer->receive_count--;
    }
    return VB_WC_SUCCESS;
}

/* One work request of the queue pair. Whether anything changed. */
static int step(struct qp *qp)
{
    if (qp->base.state != VB_QPS_RTS || !qp->send_count)
        return 0;
    struct pending *p = &qp->sends[qp->first_send];
    int status = execute(qp, p);
    if (status < 0)
        return 0;
    struct vb_wc wc = {.wr_id = p->wr.wr_id,
                       .status = status,
                       .opcode = status ? 77 : 1, /* IBV_WC_RDMA_WRITE */
                       .vendor_err = status ? 0xfa : 0,
                       .qp_num = qp->base.qp_num};
    int signalled = (p->wr.send_flags & VB_SEND_SIGNALED) || qp->sq_sig_all;
    qp->first_send = (qp->first_send + 1) % qp->max_send;
    qp->send_count--;
    if (signalled || status)
        complete(qp, wc);
    qp->unpolled = signalled ? 0 : qp->unpolled + 1;
    if (status)
        fake_flush(qp);
    return 1;
}

void fake_progress(void)
{
    static const int events[] = {4, VB_EVENT_PORT_ACTIVE, 11, 12, VB_EVENT_GID_CHANGE}; /* of no consequence */
    int count = 0, idle = 0;
    for (struct qp *qp = fake_qps; qp; qp = qp->next, count++)
        if (!fake_knobs.gone)
            deliver_late(qp);
    while (count && !fake_knobs.hold && !fake_knobs.gone && idle < 2 * count) {
        if (chance(fake_knobs.chance_delay))
            return;
        if (chance(fake_knobs.chance_event) && fake_counts.events < 1000) {
            int type = events[draw() % 5];
            fake_raise(fake_qps->base.context, type, type == 4 ? fake_qps->base.qp_num : 1);
        }
        int pick = (int)(draw() % (uint32_t)count);
        struct qp *qp = fake_qps;
        while (pick--)
            qp = qp->next;
        idle = step(qp) ? 0 : idle + 1;
    }
}

int fake_poll(struct vb_cq *target, int count, struct vb_wc *wc)
{
    struct cq *cq = (struct cq *)target;
    pthread_mutex_lock(&fake_lock);
    fake_progress();
    if (fake_knobs.gone)
        count = 0;
    if (fake_knobs.short_poll && count > (int)fake_knobs.short_poll)
        count = (int)fake_knobs.short_poll;
    int got = 0;
    for (; got < count && cq->held; got++, cq->held--) {
        wc[got] = cq->wcs[cq->first];
        cq->first = (cq->first + 1) % cq->base.cqe;
    }
    pthread_mutex_unlock(&fake_lock);
    return got;
}

int fake_arm(struct vb_cq *target, int solicited_only)
{
    (void)solicited_only;
    pthread_mutex_lock(&fake_lock);
    ((struct cq *)target)->armed = 1;
    fake_counts.arms++;
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

static int accept_send(struct qp *qp, const struct vb_send_wr *wr)
{
    if (fake_knobs.gone)
        return EIO;
    if (qp->base.state < VB_QPS_RTS)
        return EINVAL;
    if (qp->send_count + qp->unpolled >= qp->max_send)
        return ENOMEM;
    struct pending *p = &qp->sends[(qp->first_send + qp->send_count++) % qp->max_send];
    p->wr = *wr;
    if (wr->num_sge)
        p->sge = wr->sg_list[0];
    if (wr->num_sge && (wr->send_flags & VB_SEND_INLINE))
        memcpy(p->inlined, (const void *)(uintptr_t)p->sge.addr, p->sge.length);
    return 0;
}

int fake_post_send(struct vb_qp *target, struct vb_send_wr *wr, struct vb_send_wr **bad)
{
    struct qp *qp = (struct qp *)target;
    int rc = 0, limit = -1;
    pthread_mutex_lock(&fake_lock);
    fake_counts.posts++;
    if (chance(fake_knobs.chance_partial)) {
        int chain = 0;
        for (const struct vb_send_wr *w = wr; w; w = w->next)
            chain++;
        limit = (int)(draw() % (uint32_t)chain);
    }
    for (; wr && !rc; wr = rc ? wr : wr->next)
        rc = limit-- == 0 ? (int)fake_knobs.partial_errno : accept_send(qp, wr);
    *bad = rc ? wr : NULL;
    if (qp->base.state == VB_QPS_ERR)
        fake_flush(qp);
    fake_progress();
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

int fake_post_recv(struct vb_qp *target, struct vb_recv_wr *wr, struct vb_recv_wr **bad)
{
    struct qp *qp = (struct qp *)target;
    int rc = 0;
    pthread_mutex_lock(&fake_lock);
    while (wr && !rc) {
        rc = qp->base.state < VB_QPS_INIT ? EINVAL : qp->receive_count == qp->max_recv ? ENOMEM : 0;
        if (rc)
            break;
        qp->receives[(qp->first_receive + qp->receive_count++) % qp->max_recv] = wr->wr_id;
        wr = wr->next;
    }
    *bad = wr;
    if (qp->base.state == VB_QPS_ERR)
        fake_flush(qp);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}
