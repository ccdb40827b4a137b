/* jaxrl_sync.sharding._kernels: the Python face of the CPU kernels. The caller has checked every extent;
 * here only sizes of the tables and indices of buffers are checked again. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#include <string.h>

extern PyMethodDef delta_methods[];
int add_ffi_handlers(PyObject *module);

static int check_table(const Py_buffer *table, size_t row, const Py_buffer *sources, const Py_buffer *targets)
{
    if ((size_t)table->len % row != 0 || sources->len % (Py_ssize_t)sizeof(uintptr_t) != 0 ||
        targets->len % (Py_ssize_t)sizeof(uint32_t) != 0) {
        PyErr_Format(PyExc_ValueError, "table of %zd bytes is no whole number of rows of %zu bytes", table->len,
                     row);
        return -1;
    }
    return 0;
}

static int check_dims(int64_t ndim, int64_t low)
{
    if (ndim >= low && ndim <= MAX_DIMS)
        return 0;
    PyErr_Format(PyExc_ValueError, "entry has %lld dimensions, expected %lld to %d", (long long)ndim,
                 (long long)low, MAX_DIMS);
    return -1;
}

static int check_index(int64_t index, Py_ssize_t count, const char *what)
{
    if (index >= 0 && index < count)
        return 0;
    PyErr_Format(PyExc_ValueError, "entry names %s %lld of %zd", what, (long long)index, count);
    return -1;
}

static int check_run(int64_t run, int64_t low)
{
    if (run >= low)
        return 0;
    PyErr_Format(PyExc_ValueError, "entry has a run of %lld bytes, expected at least %lld", (long long)run,
                 (long long)low);
    return -1;
}

/* A stream is walked run by run, so that none of its entries may be empty. */
static int check_filled(const copy_entry *e)
{
    for (int64_t d = 0; d < e->ndim; d++)
        if (e->shape[d] < 1) {
            PyErr_Format(PyExc_ValueError, "entry has size %lld in dimension %lld, expected at least 1",
                         (long long)e->shape[d], (long long)d);
            return -1;
        }
    return check_run(e->run, 1);
}

/* A gang must end inside the table, and its members' rows must be as many and as long as their leader's.
 * `end`: where the last gang ends, updated. */
static int check_gang(const copy_entry *entries, int64_t i, int64_t count, int64_t *end)
{
    const copy_entry *e = &entries[i];
    if (i < *end)
        return 0;
    if (e->gang < 1 || e->gang > MAX_GANG || e->gang > count - i) {
        PyErr_Format(PyExc_ValueError, "entry %lld leads a gang of %lld, expected 1 to %d within %lld entries",
                     (long long)i, (long long)e->gang, MAX_GANG, (long long)count);
        return -1;
    }
    for (int64_t g = 1; g < e->gang; g++)
        if (e[g].gang != 0 || e[g].run != e->run || e[g].ndim != e->ndim ||
            memcmp(e[g].shape, e->shape, sizeof e->shape) != 0) {
            PyErr_Format(PyExc_ValueError, "entry %lld differs from the leader of its gang", (long long)(i + g));
            return -1;
        }
    *end = i + e->gang;
    return 0;
}

static PyObject *copy_table(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer table, sources, targets;
    int threads, streaming;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*ii:copy_table", &table, &sources, &targets, &threads, &streaming))
        return NULL;
    if (check_table(&table, sizeof(copy_entry), &sources, &targets) < 0)
        goto done;
    const copy_entry *entries = table.buf;
    int64_t count = (int64_t)((size_t)table.len / sizeof(copy_entry)), end = 0;
    for (int64_t i = 0; i < count; i++)
        if (check_dims(entries[i].ndim, 0) < 0 || check_run(entries[i].run, 0) < 0 ||
            check_gang(entries, i, count, &end) < 0 ||
            check_index(entries[i].source, sources.len / (Py_ssize_t)sizeof(uintptr_t), "source") < 0 ||
            check_index(entries[i].target, targets.len / (Py_ssize_t)sizeof(uintptr_t), "target") < 0)
            goto done;
    Py_BEGIN_ALLOW_THREADS
    run_copies(entries, count, sources.buf, targets.buf, threads, streaming);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&table);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&targets);
    return result;
}

static PyObject *sum_table(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer table, sources, sums;
    int threads;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*w*i:sum_table", &table, &sources, &sums, &threads))
        return NULL;
    if (check_table(&table, sizeof(sum_entry), &sources, &sums) < 0)
        goto done;
    const sum_entry *entries = table.buf;
    int64_t count = (int64_t)((size_t)table.len / sizeof(sum_entry));
    for (int64_t i = 0; i < count; i++)
        if (check_dims(entries[i].ndim, 1) < 0 ||
            check_index(entries[i].source, sources.len / (Py_ssize_t)sizeof(uintptr_t), "source") < 0 ||
            check_index(entries[i].group, sums.len / (Py_ssize_t)(2 * sizeof(uint32_t)), "group") < 0)
            goto done;
    Py_BEGIN_ALLOW_THREADS
    run_sums(entries, count, sources.buf, sums.buf, threads);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&table);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&sums);
    return result;
}

static PyObject *stream_table(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer table, buffers;
    int fd, receive, error = 0;
    long long skip, limit;
    int64_t done = 0;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "ipy*y*LL:stream_table", &fd, &receive, &table, &buffers, &skip, &limit))
        return NULL;
    if (check_table(&table, sizeof(copy_entry), &buffers, &buffers) < 0)
        goto done;
    const copy_entry *entries = table.buf;
    int64_t count = (int64_t)((size_t)table.len / sizeof(copy_entry)), end = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t index = receive ? entries[i].target : entries[i].source;
        if (check_dims(entries[i].ndim, 0) < 0 || check_filled(&entries[i]) < 0 ||
            check_gang(entries, i, count, &end) < 0 ||
            check_index(index, buffers.len / (Py_ssize_t)sizeof(uintptr_t), "buffer") < 0)
            goto done;
    }
    if (skip < 0 || limit < 0) {
        PyErr_Format(PyExc_ValueError, "skip %lld and limit %lld, expected at least 0", skip, limit);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    done = run_stream(fd, receive, entries, count, buffers.buf, skip, limit, &error);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("Li", (long long)done, error);
done:
    PyBuffer_Release(&table);
    PyBuffer_Release(&buffers);
    return result;
}

static PyObject *summed_table(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer table, sources, targets, sums;
    int threads, streaming;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*w*ii:summed_table", &table, &sources, &targets, &sums, &threads,
                          &streaming))
        return NULL;
    if (check_table(&table, sizeof(summed_entry), &sources, &targets) < 0)
        goto done;
    const summed_entry *entries = table.buf;
    int64_t count = (int64_t)((size_t)table.len / sizeof(summed_entry));
    for (int64_t i = 0; i < count; i++)
        if (check_dims(entries[i].ndim, 1) < 0 ||
            check_index(entries[i].source, sources.len / (Py_ssize_t)sizeof(uintptr_t), "source") < 0 ||
            check_index(entries[i].target, targets.len / (Py_ssize_t)sizeof(uintptr_t), "target") < 0 ||
            check_index(entries[i].group, sums.len / (Py_ssize_t)(2 * sizeof(uint32_t)), "group") < 0)
            goto done;
    Py_BEGIN_ALLOW_THREADS
    run_summed(entries, count, sources.buf, targets.buf, sums.buf, threads, streaming);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&table);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sums);
    return result;
}

static PyMethodDef methods[] = {
    {"stream_table", stream_table, METH_VARARGS,
     "stream_table(fd, receive, entries, addresses, skip, limit) -> (bytes, errno): runs to or from a socket."},
    {"copy_table", copy_table, METH_VARARGS,
     "copy_table(entries, source_addresses, target_addresses, threads, streaming): runs all copies."},
    {"summed_table", summed_table, METH_VARARGS,
     "summed_table(entries, source_addresses, target_addresses, sums, threads, streaming): copies, and adds keyed "
     "sums of what it read to uint32 pairs."},
    {"sum_table", sum_table, METH_VARARGS,
     "sum_table(entries, source_addresses, sums, threads): adds keyed sums to uint32 pairs."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "MAX_DIMS", MAX_DIMS) < 0 ||
        PyModule_AddFunctions(module, delta_methods) < 0 || add_ffi_handlers(module) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "HAS_AVX2", has_avx2());
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_doc = "CPU kernels of jaxrl_sync.sharding.",
    .m_size = 0,           .m_methods = methods,  .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&definition);
}
