/* jaxrl_sync.transfer._verbs: RDMA verbs for Python. See transfer/_verbs.pyi for what each call does. */
#include "verbs.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

module_state *state_of(PyTypeObject *type)
{
    return PyModule_GetState(PyType_GetModule(type));
}

PyObject *fail(module_state *state, int errnum, const char *format, ...)
{
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    PyObject *text = PyUnicode_FromFormat("%s: %s", what, errnum ? strerror(errnum) : "failed without an errno");
    PyObject *values = text ? Py_BuildValue("(iN)", errnum, text) : NULL;
    if (values) {
        PyErr_SetObject(state->error, values);
        Py_DECREF(values);
    }
    return NULL;
}

const struct vb_library *library_or_fail(module_state *state)
{
    const char *why;
    const struct vb_library *lib = vb_load(&why);
    if (!lib) {
        PyObject *values = Py_BuildValue(
            "(iN)", 0,
            PyUnicode_FromFormat("libibverbs can't be loaded (%s); install it (Debian: libibverbs1 ibverbs-providers) "
                                 "or choose another transport",
                                 why));
        if (values) {
            PyErr_SetObject(state->error, values);
            Py_DECREF(values);
        }
    }
    return lib;
}

int still_open(module_state *state, const void *resource, const char *what)
{
    if (resource)
        return 1;
    PyObject *values = Py_BuildValue("(iN)", 0, PyUnicode_FromFormat("this %s is closed", what));
    if (values) {
        PyErr_SetObject(state->error, values);
        Py_DECREF(values);
    }
    return 0;
}

int check_idle(const void *object, const char *what)
{
    if (!((const object_head *)object)->busy)
        return 0;
    PyErr_Format(PyExc_BufferError, "%s is in use by a call in another thread", what);
    return -1;
}

PyObject *enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

PyObject *leave(PyObject *self, PyObject *args)
{
    (void)args;
    return PyObject_CallMethod(self, "close", NULL);
}

void warn_unclosed(const char *what, PyObject *device)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_WarnFormat(PyExc_ResourceWarning, 1, "unclosed %s on %U", what, device) < 0)
        PyErr_WriteUnraisable(device);
    PyErr_Restore(type, value, traceback);
}

uint64_t ns_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

double seconds_now(void)
{
    return (double)ns_now() * 1e-9;
}

void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *load_error(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    const char *why;
    if (vb_load(&why))
        Py_RETURN_NONE;
    return PyUnicode_FromString(why);
}

static PyObject *library_name(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(vb_library_name());
}

static PyObject *features(PyObject *module, PyObject *unused)
{
    (void)unused;
    const struct vb_library *lib = library_or_fail(PyModule_GetState(module));
    if (!lib)
        return NULL;
    return Py_BuildValue("{s:O,s:O,s:O,s:O}", "dmabuf", lib->reg_dmabuf_mr ? Py_True : Py_False, "relaxed_ordering",
                         lib->reg_mr_iova2 ? Py_True : Py_False, "fork_status",
                         lib->is_fork_initialized ? Py_True : Py_False, "ece",
                         lib->query_ece && lib->set_ece ? Py_True : Py_False);
}

static PyObject *device_names(PyObject *module, PyObject *unused)
{
    (void)unused;
    const struct vb_library *lib = library_or_fail(PyModule_GetState(module));
    if (!lib)
        return NULL;
    PyObject *names = PyList_New(0);
    if (!names)
        return NULL;
    int count = 0;
    struct vb_device **list = lib->get_device_list(&count); /* NULL without kernel modules: no devices */
    for (int i = 0; list && i < count; i++) {
        PyObject *name = PyUnicode_FromString(lib->get_device_name(list[i]));
        if (!name || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
        if (!names)
            break;
    }
    if (list)
        lib->free_device_list(list);
    return names;
}

static PyObject *status_text(PyObject *module, PyObject *arg)
{
    const struct vb_library *lib = library_or_fail(PyModule_GetState(module));
    long status = PyLong_AsLong(arg);
    if (!lib || (status == -1 && PyErr_Occurred()))
        return NULL;
    if (status < 0 || status >= VB_WC_STATUS_COUNT)
        return PyUnicode_FromFormat("unknown status %ld", status);
    return PyUnicode_FromString(lib->wc_status_str((int)status));
}

static PyMethodDef methods[] = {
    {"load_error", load_error, METH_NOARGS, "load_error(): None if libibverbs loads, else why not."},
    {"library_name", library_name, METH_NOARGS, "library_name(): what the loader is asked for."},
    {"features", features, METH_NOARGS, "features(): optional calls that this libibverbs has."},
    {"device_names", device_names, METH_NOARGS, "device_names(): RDMA devices of this machine."},
    {"status_text", status_text, METH_O, "status_text(status): the library's words for a completion status."},
    {NULL, NULL, 0, NULL},
};

static int import_from(const char *module, const char *name, PyObject **target)
{
    PyObject *found = PyImport_ImportModule(module);
    if (!found)
        return -1;
    *target = PyObject_GetAttrString(found, name);
    Py_DECREF(found);
    return *target ? 0 : -1;
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **target)
{
    *target = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *target ? PyModule_AddType(module, *target) : -1;
}

static int module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->next_token = 1;
    if (import_from("jaxrl_sync.transfer.verbs.errors", "VerbsError", &state->error) < 0 ||
        import_from("weakref", "WeakSet", &state->weak_set) < 0)
        return -1;
    if (add_type(module, &context_spec, &state->context) < 0 || add_type(module, &region_spec, &state->region) < 0 ||
        add_type(module, &cq_spec, &state->cq) < 0 || add_type(module, &qp_spec, &state->qp) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "RECORD_BYTES", (long)sizeof(record));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    module_state *state = PyModule_GetState(module);
    Py_VISIT(state->error);
    Py_VISIT(state->weak_set);
    Py_VISIT(state->context);
    Py_VISIT(state->region);
    Py_VISIT(state->cq);
    Py_VISIT(state->qp);
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->error);
    Py_CLEAR(state->weak_set);
    Py_CLEAR(state->context);
    Py_CLEAR(state->region);
    Py_CLEAR(state->cq);
    Py_CLEAR(state->qp);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

struct PyModuleDef verbs_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_verbs",
    .m_doc = "RDMA verbs of jaxrl_sync.transfer.",
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__verbs(void)
{
    return PyModuleDef_Init(&verbs_module);
}
