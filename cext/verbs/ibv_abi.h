/* The part of the libibverbs ABI (IBVERBS_1.1) that the extension uses, declared here so that neither headers nor
 * library are needed at build. Names carry the prefix vb_; tests/verbs/abi_check.c compares sizes, offsets and
 * constants with <infiniband/verbs.h> where that is installed. No Python here. */
#ifndef JAXRL_SYNC_IBV_ABI_H
#define JAXRL_SYNC_IBV_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct vb_device; /* opaque */
struct vb_srq;    /* opaque */
struct vb_context;
struct vb_cq;
struct vb_qp;

union vb_gid {
    uint8_t raw[16];
    uint64_t halves[2];
};

struct vb_device_attr {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
    int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
    int atomic_cap;
    int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp;
    int max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
    int max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct vb_port_attr {
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply;
    uint8_t active_width, active_speed, phys_state, link_layer, flags;
    uint16_t port_cap_flags2;
    uint32_t room[8]; /* newer libraries may write more */
};

struct vb_pd {
    struct vb_context *context;
    uint32_t handle;
};

struct vb_mr {
    struct vb_context *context;
    struct vb_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct vb_comp_channel {
    struct vb_context *context;
    int fd, refcnt;
};

struct vb_cq {
    struct vb_context *context;
    struct vb_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed, async_events_completed;
};

struct vb_qp {
    struct vb_context *context;
    void *qp_context;
    struct vb_pd *pd;
    struct vb_cq *send_cq, *recv_cq;
    struct vb_srq *srq;
    uint32_t handle, qp_num;
    int state, qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct vb_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct vb_qp_init_attr {
    void *qp_context;
    struct vb_cq *send_cq, *recv_cq;
    struct vb_srq *srq;
    struct vb_qp_cap cap;
    int qp_type, sq_sig_all;
};

struct vb_global_route {
    union vb_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
};

struct vb_ah_attr {
    struct vb_global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct vb_qp_attr {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned int qp_access_flags;
    struct vb_qp_cap cap;
    struct vb_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout;
    uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
};

struct vb_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct vb_send_wr {
    uint64_t wr_id;
    struct vb_send_wr *next;
    struct vb_sge *sg_list;
    int num_sge, opcode;
    unsigned int send_flags;
    uint32_t imm_data; /* big endian on the wire and here */
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t remote_addr, compare_add, swap;
            uint32_t rkey;
        } atomic;
    } wr;
    uint32_t remote_srqn;
    uint64_t other[6]; /* memory windows and segmentation, unused */
};

struct vb_recv_wr {
    uint64_t wr_id;
    struct vb_recv_wr *next;
    struct vb_sge *sg_list;
    int num_sge;
};

struct vb_wc {
    uint64_t wr_id;
    int status, opcode; /* opcode has no meaning where status is not success */
    uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

struct vb_async_event {
    union {
        struct vb_cq *cq;
        struct vb_qp *qp;
        struct vb_srq *srq;
        int port_num;
    } element;
    int event_type;
};

struct vb_ece { /* enhanced connection establishment: what two devices of one vendor agree on */
    uint32_t vendor_id, options, comp_mask;
};

typedef void (*vb_unused)(void);

struct vb_context_ops { /* only the data path goes through here, everything else through symbols */
    vb_unused before_poll[11];
    int (*poll_cq)(struct vb_cq *cq, int count, struct vb_wc *wc);
    int (*req_notify_cq)(struct vb_cq *cq, int solicited_only);
    vb_unused before_post[12];
    int (*post_send)(struct vb_qp *qp, struct vb_send_wr *wr, struct vb_send_wr **bad);
    int (*post_recv)(struct vb_qp *qp, struct vb_recv_wr *wr, struct vb_recv_wr **bad);
    vb_unused after_post[5];
};

struct vb_context {
    struct vb_device *device;
    struct vb_context_ops ops;
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};

enum { VB_QPS_RESET, VB_QPS_INIT, VB_QPS_RTR, VB_QPS_RTS, VB_QPS_SQD, VB_QPS_SQE, VB_QPS_ERR };
enum { VB_QPT_RC = 2 };
enum { VB_WR_RDMA_WRITE = 0, VB_WR_RDMA_WRITE_WITH_IMM = 1 };
enum { VB_WC_RECV = 128, VB_WC_RECV_RDMA_WITH_IMM = 129 };
enum { VB_WC_SUCCESS = 0, VB_WC_WR_FLUSH_ERR = 5, VB_WC_GENERAL_ERR = 21, VB_WC_STATUS_COUNT = 24 };
enum { VB_WC_WITH_IMM = 2 };
enum { VB_SEND_SIGNALED = 2, VB_SEND_INLINE = 8 };
enum { VB_ACCESS_LOCAL_WRITE = 1, VB_ACCESS_REMOTE_WRITE = 2, VB_ACCESS_REMOTE_READ = 4 };
enum { VB_ACCESS_RELAXED_ORDERING = 1 << 20 };
enum { VB_EVENT_CQ_ERR, VB_EVENT_QP_FATAL, VB_EVENT_QP_REQ_ERR, VB_EVENT_QP_ACCESS_ERR };
enum { VB_EVENT_DEVICE_FATAL = 8, VB_EVENT_PORT_ACTIVE, VB_EVENT_PORT_ERR, VB_EVENT_GID_CHANGE = 18 };
enum {
    VB_QP_STATE = 1 << 0,
    VB_QP_ACCESS_FLAGS = 1 << 3,
    VB_QP_PKEY_INDEX = 1 << 4,
    VB_QP_PORT = 1 << 5,
    VB_QP_AV = 1 << 7,
    VB_QP_PATH_MTU = 1 << 8,
    VB_QP_TIMEOUT = 1 << 9,
    VB_QP_RETRY_CNT = 1 << 10,
    VB_QP_RNR_RETRY = 1 << 11,
    VB_QP_RQ_PSN = 1 << 12,
    VB_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    VB_QP_MIN_RNR_TIMER = 1 << 15,
    VB_QP_SQ_PSN = 1 << 16,
    VB_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    VB_QP_CAP = 1 << 19,
    VB_QP_DEST_QPN = 1 << 20
};

#endif
