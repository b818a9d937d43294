/* A libibverbs of one process, built against the real header: one card whose queue pairs copy memory to each other.
 * It checks what a card checks: masks and states, keys and bounds, posted receives, packet numbers. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_query_port

#define MANY 256
struct queue { struct ibv_cq cq; struct ibv_wc items[MANY]; int first, count, armed; };
struct channel { struct ibv_comp_channel channel; int write_end; };
struct pair {
	struct ibv_qp qp; struct ibv_qp_init_attr setup; struct ibv_qp_attr now;
	struct ibv_recv_wr receives[MANY]; struct ibv_sge segments[MANY]; int first, count;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pair *pairs[MANY];
static struct ibv_mr *regions[MANY];
static int accesses[MANY];
int stand_in_port_is_down, stand_in_link_is_infiniband; /* set by the tests of them */
static struct ibv_device device = {.name = "stand_in0"};
static struct ibv_device *devices[] = {&device, NULL};
static struct ibv_context context;

static int free_place(void **table) { int at = 2; while (at < MANY && table[at]) at++; return at; }

static int allowed(uint64_t place, uint64_t size, uint32_t key, int access) {
	struct ibv_mr *one = key < MANY ? regions[key] : NULL;
	if (!one || (accesses[key] & access) != access) return 0;
	return place >= (uint64_t)one->addr && place + size <= (uint64_t)one->addr + one->length;
}

static void complete(struct ibv_cq *cq, struct ibv_wc wc) {
	struct queue *queue = (struct queue *)cq;
	queue->items[(queue->first + queue->count++) % MANY] = wc;
	if (queue->armed) {
		queue->armed = 0;
		if (write(((struct channel *)cq->channel)->write_end, "e", 1) < 0) abort();
	}
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *into) {
	struct queue *queue = (struct queue *)cq;
	int count = 0;
	pthread_mutex_lock(&lock);
	for (; count < most && queue->count; count++, queue->count--)
		into[count] = queue->items[queue->first++ % MANY];
	queue->first %= MANY;
	pthread_mutex_unlock(&lock);
	return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited) {
	(void)solicited;
	pthread_mutex_lock(&lock);
	((struct queue *)cq)->armed = 1;
	pthread_mutex_unlock(&lock);
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
	struct pair *mine = (struct pair *)qp;
	int result = 0;
	pthread_mutex_lock(&lock);
	if (wr->next || wr->num_sge != 1 || mine->count >= (int)mine->setup.cap.max_recv_wr || mine->now.qp_state < IBV_QPS_INIT) {
		*bad = wr;
		result = ENOMEM;
	} else {
		int at = (mine->first + mine->count++) % MANY;
		mine->receives[at] = *wr;
		mine->segments[at] = *wr->sg_list;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

static enum ibv_wc_status deliver(struct pair *mine, struct ibv_send_wr *wr) {
	struct pair *peer = mine->now.dest_qp_num < MANY ? pairs[mine->now.dest_qp_num] : NULL;
	struct ibv_sge from = *wr->sg_list;
	if (!allowed(from.addr, from.length, from.lkey, IBV_ACCESS_LOCAL_WRITE)) return IBV_WC_LOC_PROT_ERR;
	if (!peer || peer->now.qp_state < IBV_QPS_RTR || peer->now.dest_qp_num != mine->qp.qp_num) return IBV_WC_RETRY_EXC_ERR;
	if (peer->now.rq_psn != mine->now.sq_psn) return IBV_WC_RETRY_EXC_ERR;
	if (!peer->count) return IBV_WC_RNR_RETRY_EXC_ERR;
	int at = peer->first;
	struct ibv_sge into = peer->segments[at];
	struct ibv_wc wc = {.wr_id = peer->receives[at].wr_id, .byte_len = from.length, .qp_num = peer->qp.qp_num};
	if (wr->opcode == IBV_WR_SEND) {
		if (from.length > into.length || !allowed(into.addr, into.length, into.lkey, IBV_ACCESS_LOCAL_WRITE)) return IBV_WC_REM_INV_REQ_ERR;
		memcpy((void *)into.addr, (void *)from.addr, from.length);
		wc.opcode = IBV_WC_RECV;
	} else if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		if (!allowed(wr->wr.rdma.remote_addr, from.length, wr->wr.rdma.rkey, IBV_ACCESS_REMOTE_WRITE)) return IBV_WC_REM_ACCESS_ERR;
		memcpy((void *)wr->wr.rdma.remote_addr, (void *)from.addr, from.length);
		wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
		wc.imm_data = wr->imm_data;
		wc.wc_flags = IBV_WC_WITH_IMM;
	} else return IBV_WC_LOC_QP_OP_ERR;
	peer->first = (at + 1) % MANY;
	peer->count--;
	complete(peer->setup.recv_cq, wc);
	return IBV_WC_SUCCESS;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
	struct pair *mine = (struct pair *)qp;
	int result = 0;
	pthread_mutex_lock(&lock);
	if (wr->next || wr->num_sge != 1 || !(wr->send_flags & IBV_SEND_SIGNALED) || mine->now.qp_state < IBV_QPS_RTS) {
		*bad = wr;
		result = EINVAL;
	} else {
		struct ibv_wc wc = {.wr_id = wr->wr_id, .opcode = IBV_WC_SEND, .qp_num = qp->qp_num};
		wc.status = mine->now.qp_state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : deliver(mine, wr);
		if (wc.status) mine->now.qp_state = IBV_QPS_ERR;
		complete(mine->setup.send_cq, wc);
	}
	pthread_mutex_unlock(&lock);
	return result;
}

struct ibv_device **ibv_get_device_list(int *count) { *count = 1; return devices; }
void ibv_free_device_list(struct ibv_device **list) { (void)list; }
const char *ibv_get_device_name(struct ibv_device *one) { return one->name; }

struct ibv_context *ibv_open_device(struct ibv_device *one) {
	context.device = one;
	context.ops.poll_cq = poll_cq;
	context.ops.req_notify_cq = req_notify_cq;
	context.ops.post_send = post_send;
	context.ops.post_recv = post_recv;
	return &context;
}
int ibv_close_device(struct ibv_context *one) { (void)one; return 0; }

int ibv_query_port(struct ibv_context *one, uint8_t port, struct _compat_ibv_port_attr *into) {
	struct ibv_port_attr *attr = (struct ibv_port_attr *)into;
	(void)one;
	memset(attr, 0, sizeof *attr);
	attr->state = stand_in_port_is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
	attr->active_mtu = IBV_MTU_1024;
	attr->lid = 7;
	attr->link_layer = stand_in_link_is_infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
	return port == 1 ? 0 : EINVAL;
}
int ibv_query_gid(struct ibv_context *one, uint8_t port, int index, union ibv_gid *gid) {
	(void)one;
	memcpy(gid->raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\1", 16);
	return port == 1 && index >= 0 && index < 4 ? 0 : EINVAL;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *one) {
	struct ibv_pd *pd = calloc(1, sizeof *pd);
	pd->context = one;
	return pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd) { free(pd); return 0; }

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
	pthread_mutex_lock(&lock);
	int at = free_place((void **)regions);
	struct ibv_mr *one = calloc(1, sizeof *one);
	*one = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = addr, .length = length, .lkey = at, .rkey = at};
	regions[at] = one;
	accesses[at] = access;
	pthread_mutex_unlock(&lock);
	return one;
}
int ibv_dereg_mr(struct ibv_mr *one) { regions[one->lkey] = NULL; free(one); return 0; }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *one) {
	struct channel *made = calloc(1, sizeof *made);
	int ends[2];
	if (pipe(ends)) return NULL;
	made->channel.context = one;
	made->channel.fd = ends[0];
	made->write_end = ends[1];
	return &made->channel;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *one) {
	close(one->fd);
	close(((struct channel *)one)->write_end);
	free(one);
	return 0;
}
struct ibv_cq *ibv_create_cq(struct ibv_context *one, int size, void *mine, struct ibv_comp_channel *channel, int vector) {
	struct queue *made = size <= MANY && !vector ? calloc(1, sizeof *made) : NULL;
	if (!made) { errno = EINVAL; return NULL; }
	made->cq.context = one;
	made->cq.channel = channel;
	made->cq.cq_context = mine;
	return &made->cq;
}
int ibv_destroy_cq(struct ibv_cq *one) { free(one); return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **mine) {
	char byte;
	if (read(channel->fd, &byte, 1) != 1) return -1;
	*cq = NULL;
	*mine = NULL;
	return 0;
}
void ibv_ack_cq_events(struct ibv_cq *one, unsigned int count) { (void)one; (void)count; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *setup) {
	if (setup->qp_type != IBV_QPT_RC || !setup->sq_sig_all || setup->srq || setup->cap.max_send_sge != 1) {
		errno = EINVAL;
		return NULL;
	}
	pthread_mutex_lock(&lock);
	int at = free_place((void **)pairs);
	struct pair *made = pairs[at] = calloc(1, sizeof *made);
	made->setup = *setup;
	made->qp.context = pd->context;
	made->qp.pd = pd;
	made->qp.qp_num = at;
	pthread_mutex_unlock(&lock);
	return &made->qp;
}
int ibv_destroy_qp(struct ibv_qp *one) {
	pthread_mutex_lock(&lock);
	pairs[one->qp_num] = NULL;
	free(one);
	pthread_mutex_unlock(&lock);
	return 0;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *to, int mask) {
	struct pair *mine = (struct pair *)qp;
	struct ibv_qp_attr *now = &mine->now;
	const struct ibv_ah_attr *way = &to->ah_attr;
	if (to->qp_state == IBV_QPS_INIT && now->qp_state == IBV_QPS_RESET &&
	    mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) && to->port_num == 1 &&
	    to->qp_access_flags == IBV_ACCESS_REMOTE_WRITE) {
	} else if (to->qp_state == IBV_QPS_RTR && now->qp_state == IBV_QPS_INIT &&
		   mask == (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) &&
		   to->path_mtu == IBV_MTU_1024 && way->is_global && way->port_num == 1 && way->grh.hop_limit > 1 &&
		   !way->grh.sgid_index && way->grh.dgid.raw[15] == 1 && way->grh.dgid.raw[12] == 10) {
		now->rq_psn = to->rq_psn;
		now->dest_qp_num = to->dest_qp_num;
	} else if (to->qp_state == IBV_QPS_RTS && now->qp_state == IBV_QPS_RTR &&
		   mask == (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			    IBV_QP_MAX_QP_RD_ATOMIC) && to->timeout && to->retry_cnt == 7 && to->rnr_retry == 7) {
		now->sq_psn = to->sq_psn;
	} else return EINVAL;
	now->qp_state = to->qp_state;
	return 0;
}
const char *ibv_wc_status_str(enum ibv_wc_status status) { return status == IBV_WC_RETRY_EXC_ERR ? "transport retry counter exceeded" : "work failed"; }
