/* libibverbs, opened at run time. No Python here. */
#ifndef JAXRL_SYNC_IBV_DL_H
#define JAXRL_SYNC_IBV_DL_H

#include "ibv_abi.h"

/* name, result, arguments, symbol version; the second list may be absent in older libraries */
#define VB_REQUIRED(X)                                                                                                \
    X(get_device_list, struct vb_device **, (int *count), "IBVERBS_1.1")                                              \
    X(free_device_list, void, (struct vb_device **list), "IBVERBS_1.1")                                               \
    X(get_device_name, const char *, (struct vb_device *device), "IBVERBS_1.1")                                       \
    X(open_device, struct vb_context *, (struct vb_device *device), "IBVERBS_1.1")                                    \
    X(close_device, int, (struct vb_context *context), "IBVERBS_1.1")                                                 \
    X(get_async_event, int, (struct vb_context *context, struct vb_async_event *event), "IBVERBS_1.1")                \
    X(ack_async_event, void, (struct vb_async_event *event), "IBVERBS_1.1")                                           \
    X(query_device, int, (struct vb_context *context, struct vb_device_attr *attr), "IBVERBS_1.1")                    \
    X(query_port, int, (struct vb_context *context, uint8_t port, struct vb_port_attr *attr), "IBVERBS_1.1")          \
    X(query_gid, int, (struct vb_context *context, uint8_t port, int index, union vb_gid *gid), "IBVERBS_1.1")        \
    X(query_pkey, int, (struct vb_context *context, uint8_t port, int index, uint16_t *pkey), "IBVERBS_1.1")          \
    X(alloc_pd, struct vb_pd *, (struct vb_context *context), "IBVERBS_1.1")                                          \
    X(dealloc_pd, int, (struct vb_pd *pd), "IBVERBS_1.1")                                                             \
    X(reg_mr, struct vb_mr *, (struct vb_pd *pd, void *addr, size_t length, int access), "IBVERBS_1.1")               \
    X(dereg_mr, int, (struct vb_mr *mr), "IBVERBS_1.1")                                                               \
    X(create_comp_channel, struct vb_comp_channel *, (struct vb_context *context), "IBVERBS_1.0")                     \
    X(destroy_comp_channel, int, (struct vb_comp_channel *channel), "IBVERBS_1.0")                                    \
    X(create_cq, struct vb_cq *,                                                                                      \
      (struct vb_context *context, int cqe, void *user, struct vb_comp_channel *channel, int vector), "IBVERBS_1.1")  \
    X(destroy_cq, int, (struct vb_cq *cq), "IBVERBS_1.1")                                                             \
    X(get_cq_event, int, (struct vb_comp_channel *channel, struct vb_cq **cq, void **user), "IBVERBS_1.1")            \
    X(ack_cq_events, void, (struct vb_cq *cq, unsigned int count), "IBVERBS_1.1")                                     \
    X(create_qp, struct vb_qp *, (struct vb_pd *pd, struct vb_qp_init_attr *attr), "IBVERBS_1.1")                     \
    X(modify_qp, int, (struct vb_qp *qp, struct vb_qp_attr *attr, int mask), "IBVERBS_1.1")                           \
    X(query_qp, int, (struct vb_qp *qp, struct vb_qp_attr *attr, int mask, struct vb_qp_init_attr *init),              \
      "IBVERBS_1.1")                                                                                                  \
    X(destroy_qp, int, (struct vb_qp *qp), "IBVERBS_1.1")                                                             \
    X(fork_init, int, (void), "IBVERBS_1.1")                                                                          \
    X(wc_status_str, const char *, (int status), "IBVERBS_1.1")                                                       \
    X(event_type_str, const char *, (int event), "IBVERBS_1.1")
#define VB_OPTIONAL(X)                                                                                                \
    X(is_fork_initialized, int, (void), "IBVERBS_1.13")                                                               \
    X(reg_mr_iova2, struct vb_mr *,                                                                                   \
      (struct vb_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access), "IBVERBS_1.8")               \
    X(query_ece, int, (struct vb_qp *qp, struct vb_ece *ece), "IBVERBS_1.10")                                         \
    X(set_ece, int, (struct vb_qp *qp, struct vb_ece *ece), "IBVERBS_1.10")                                           \
    X(reg_dmabuf_mr, struct vb_mr *,                                                                                  \
      (struct vb_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access), "IBVERBS_1.12")

struct vb_library {
#define VB_MEMBER(name, result, arguments, version) result(*name) arguments;
    VB_REQUIRED(VB_MEMBER)
    VB_OPTIONAL(VB_MEMBER)
#undef VB_MEMBER
};

/* The library's functions, or NULL; then *error is a text that lives as long as the process. A success is kept,
 * a failure is tried again at the next call. JAXRL_SYNC_IBVERBS names another library than libibverbs.so.1. */
const struct vb_library *vb_load(const char **error);

/* Where the library was asked for: a path or a name for the loader. */
const char *vb_library_name(void);

#endif
