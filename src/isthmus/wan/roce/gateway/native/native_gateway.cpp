// `NativeGateway`: the state machine of `gateway.py` in C++, with the same instructions for the same events.
//
// The version in Python is its specification. Connection messages, and the templates of answers, which a flow needs
// once, are Python's here too.
#include <new>

#include "incoming_side.hpp"

namespace isthmus {

class NativeGateway {
  public:
    NativeGateway(const Object &python_settings, const Object &epoch)
        : settings(python_settings), fixed_(read(python_settings)), link_(checked(epoch, python_settings), fixed_),
          connections_(make_connections(python_settings), classes_),
          outgoing_(fixed_, link_, pairs_, connections_), incoming_(fixed_, link_, pairs_, connections_, outgoing_) {
        const auto load = [](const char *module, const char *name) {
            return Object::stolen(PyImport_ImportModule(module)).attribute(name);
        };
        const char *events = "isthmus.wan.roce.gateway.gateway_events", *view = "isthmus.wan.roce.roce_view";
        classes_.nic_frame = load(events, "NicFrame");
        classes_.nic_frames = load(events, "NicFrames");
        classes_.link_datagram = load(events, "LinkDatagram");
        classes_.link_datagrams = load(events, "LinkDatagrams");
        classes_.send_to_nic = load(events, "SendToNic");
        classes_.send_on_link = load(events, "SendOnLink");
        classes_.queue_pair_failed = load(events, "QueuePairFailed");
        classes_.flow_failure = load("isthmus.wan.roce.gateway.gateway_datagram", "FlowFailure");
        classes_.reply_template = load("isthmus.wan.roce.near_replies", "ReplyTemplate");
        classes_.statistics = load("isthmus.wan.roce.gateway.gateway", "GatewayStatistics");
        classes_.view_frame = load(view, "view_frame");
    }
    Object settings;
    bool is_busy = false;

    int64_t held_bytes() const { return outgoing_.held.used + incoming_.held.used; }
    int64_t num_waiting_bytes() const { return outgoing_.held.unsent; }
    bool is_connected() const { return link_.is_known(); }
    double next_tick_s(double now_s) {
        return std::min({link_.hello_s, outgoing_.next_s(now_s), incoming_.next_s()});
    }

    Object handle(PyObject *event, double now_s) {
        Instructions out(classes_);
        PyObject *kind = reinterpret_cast<PyObject *>(Py_TYPE(event));
        const bool is_frame = kind == classes_.nic_frame.get(), is_datagram = kind == classes_.link_datagram.get();
        if (is_frame || kind == classes_.nic_frames.get())
            for_each(event, is_frame, [&](const Object &frame) { take_frame(frame, now_s, out); });
        else if (is_datagram || kind == classes_.link_datagrams.get())
            for_each(event, is_datagram, [&](const Object &data) { take_datagram(data, now_s, out); });
        if (now_s >= link_.hello_s) link_.hello(now_s, out);
        incoming_.finish(now_s, out);
        outgoing_.tick(now_s, out);
        incoming_.tick(now_s, out);
        fail_partners(now_s, out);
        outgoing_.pump(now_s, out);
        return out.take();
    }
    Object statistics() const {
        const auto number = [](int64_t value) { return static_cast<long long>(value); };
        const Object none = Object::stolen(PyTuple_New(0));
        const Object fields = Object::stolen(Py_BuildValue(
            "{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:d}", "num_queue_pairs",
            number(int64_t(outgoing_.size() + incoming_.size())), "num_paired", number(int64_t(pairs_.size())),
            "held_bytes", number(held_bytes()), "frames_taken", number(outgoing_.num_taken), "frames_absorbed",
            number(outgoing_.num_absorbed), "frames_sent", number(outgoing_.num_sent), "frames_sent_again",
            number(outgoing_.num_sent_again), "frames_repeated", number(incoming_.num_repeated), "frames_handed",
            number(incoming_.num_handed), "frames_refused",
            number(num_refused_ + outgoing_.num_refused + incoming_.num_refused), "near_notifications",
            number(outgoing_.num_notified), "queue_pairs_failed", number(num_failed_), "round_trip_s",
            link_.least_round_trip_s));
        return Object::stolen(PyObject_Call(classes_.statistics.get(), none.get(), fields.get()));
    }

  private:
    static Settings read(const Object &from) {
        const auto real = [&](const char *name) { return from.attribute(name).as_double(); };
        const auto whole = [&](const char *name) { return int64_t(real(name)); };
        const Object acknowledges = from.attribute("acknowledge_near");
        return {real("link_bytes_per_s"), real("nic_bytes_per_s"), real("queue_mark_bytes"), real("round_trip_s"),
                real("near_notify_interval_s"), real("feedback_interval_s"), real("reorder_s"), real("nic_timeout_s"),
                real("suspect_s"), real("idle_s"), whole("max_flow_bytes"), whole("max_total_bytes"),
                whole("max_queue_pairs"), whole("max_tries"), whole("datagram_overhead_bytes"),
                PyObject_IsTrue(acknowledges.get()) == 1};
    }
    static uint32_t checked(const Object &epoch, const Object &settings) {
        const Object module = Object::stolen(PyImport_ImportModule("isthmus.wan.roce.gateway.link_state"));
        Object::stolen(PyObject_CallFunction(module.attribute("LinkState").get(), "OO", epoch.get(), settings.get()));
        return uint32_t(epoch.as_int());  // which Python's has checked
    }
    static Object make_connections(const Object &settings) {
        const Object module = Object::stolen(PyImport_ImportModule("isthmus.wan.roce.gateway.connections"));
        return Object::stolen(PyObject_CallOneArg(module.attribute("Connections").get(),
                                                  settings.attribute("max_queue_pairs").get()));
    }
    template <class Take> static void for_each(PyObject *event, bool is_one, Take take) {
        const Object content = Object::borrowed(event).item(0);
        const Object items = Object::stolen(is_one ? PyTuple_Pack(1, content.get()) : PySequence_Tuple(content.get()));
        const Py_ssize_t count = PyTuple_GET_SIZE(items.get());
        for (Py_ssize_t place = 0; place < count; ++place) {  // before one is taken, whose instructions would be lost
            if (PyBytes_Check(PyTuple_GET_ITEM(items.get(), place))) continue;
            PyErr_SetString(PyExc_TypeError, "frames and datagrams are bytes");
            throw PythonError();
        }
        for (Py_ssize_t place = 0; place < count; ++place) take(Object::borrowed(PyTuple_GET_ITEM(items.get(), place)));
    }
    void take_frame(const Object &frame, double now_s, Instructions &out) {
        const std::optional<RoceView> view = view_frame(frame);
        if (!view) {
            ++num_refused_;
            return;
        }
        if (is_in(RESPONSES, view->opcode) && incoming_.answer(*view, now_s, out)) return;
        if (view->opcode == DATAGRAM_SEND_ONLY) incoming_.note_connection(*view, true);
        else if (view->opcode == CNP && incoming_.slow_down(view->key, now_s)) return;
        outgoing_.take(*view, now_s, out);
    }
    void take_datagram(const Object &data, double now_s, Instructions &out) {
        const uint8_t *at = data_of(data.get());
        const size_t size = size_t(PyBytes_GET_SIZE(data.get()));
        if (size < HEAD_BYTES || at[0] > uint8_t(Kind::FORGET) || at[1] != 1 || at[2] > 3 || at[3] || !read_u32(at + 4)) {
            ++num_refused_;
            return;
        }
        const Kind kind = Kind(at[0]);
        const Origin origin{read_u32(at + 4), read_u32(at + 8), (at[2] & 1) == 1};
        std::optional<ListDatagram> list;
        if (kind != Kind::DATA) list = parse_list(kind, at + HEAD_BYTES, size - HEAD_BYTES);
        if (kind == Kind::DATA ? size < DATA_BYTES : !list) {
            ++num_refused_;
            return;
        }
        const Heard heard = link_.hear(origin, now_s, out);
        if (heard == Heard::IGNORED) return;
        if (heard == Heard::NEW_PEER) {
            outgoing_.begin_again(now_s);
            incoming_.lose_peer(now_s);
        }
        if (kind == Kind::DATA) {
            const Object frame = bytes_of(at + DATA_BYTES, size - DATA_BYTES);
            incoming_.take(read_u32(at + HEAD_BYTES), read_u32(at + HEAD_BYTES + 4), frame, at[2] > 1, now_s, out);
            return;
        }
        for (const Feedback &entry : list->feedback) outgoing_.feedback(entry, now_s, out);
        for (const auto &[flow, is_mine, reason] : list->failed) {
            if (is_mine) incoming_.failed_there(flow, reason, now_s, out);
            else outgoing_.failed_there(flow, reason, out);
        }
        for (const uint32_t flow : list->flows) {
            if (kind == Kind::PROBE) incoming_.probe(flow, now_s);
            else incoming_.forget(flow);
        }
    }
    void fail_partners(double now_s, Instructions &out) {
        while (!outgoing_.failed.empty() || !incoming_.failed.empty()) {
            ++num_failed_;
            if (!outgoing_.failed.empty()) {
                const Key key = outgoing_.failed.back()->key;
                outgoing_.failed.pop_back();
                const Key *partner = pairs_.incoming_of(key);
                if (const auto flow = partner ? incoming_.flow(*partner) : nullptr)
                    incoming_.fail(flow, Failure::PEER, now_s, out);
            } else {
                const Key key = incoming_.failed.back()->key;
                incoming_.failed.pop_back();
                const Key *partner = pairs_.outgoing_of(key);
                if (const auto flow = partner ? outgoing_.flow(*partner) : nullptr)
                    outgoing_.fail(flow, Failure::PEER, out);
            }
        }
    }

    Settings fixed_;
    Classes classes_;
    LinkState link_;
    QueuePairs pairs_;
    Connections connections_;
    OutgoingSide outgoing_;
    IncomingSide incoming_;
    int64_t num_refused_ = 0, num_failed_ = 0;
};

namespace {

struct Instance {
    PyObject_HEAD
    NativeGateway *gateway;
};

template <class Call> PyObject *guarded(Call call) {
    try {
        Object found = call();
        Py_INCREF(found.get());
        return found.get();
    } catch (const PythonError &) {
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

NativeGateway &of(PyObject *self) { return *reinterpret_cast<Instance *>(self)->gateway; }

PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
    PyObject *settings, *epoch;
    if (!PyArg_ParseTuple(arguments, "OO", &settings, &epoch)) return nullptr;
    return guarded([&] {
        Object self = Object::stolen(type->tp_alloc(type, 0));
        reinterpret_cast<Instance *>(self.get())->gateway =
            new NativeGateway(Object::borrowed(settings), Object::borrowed(epoch));
        return self;
    });
}

void destroy(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    delete reinterpret_cast<Instance *>(self)->gateway;
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *handle(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "handle takes an event and a time");
    return guarded([&] {
        if (of(self).is_busy) {
            PyErr_SetString(PyExc_RuntimeError, "a gateway handles one event at a time");
            throw PythonError();
        }
        struct Busy {
            bool &is_busy;
            explicit Busy(bool &one) : is_busy(one) { is_busy = true; }
            ~Busy() { is_busy = false; }
        } busy(of(self).is_busy);
        return of(self).handle(arguments[0], Object::borrowed(arguments[1]).as_double());
    });
}

PyObject *next_tick_s(PyObject *self, PyObject *now_s) {
    return guarded([&] {
        return Object::stolen(PyFloat_FromDouble(of(self).next_tick_s(Object::borrowed(now_s).as_double())));
    });
}

PyObject *statistics(PyObject *self, PyObject *) {
    return guarded([&] { return of(self).statistics(); });
}

PyMethodDef methods[] = {
    {"handle", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(handle)), METH_FASTCALL, "As `Gateway.handle`."},
    {"next_tick_s", next_tick_s, METH_O, "As `Gateway.next_tick_s`."},
    {"statistics", statistics, METH_NOARGS, "As `Gateway.statistics`."},
    {}};

PyGetSetDef attributes[] = {
    {"settings", [](PyObject *self, void *) { return guarded([&] { return of(self).settings; }); }, nullptr, nullptr, nullptr},
    {"held_bytes", [](PyObject *self, void *) { return PyLong_FromLongLong(of(self).held_bytes()); }, nullptr, nullptr, nullptr},
    {"num_waiting_bytes", [](PyObject *self, void *) { return PyLong_FromLongLong(of(self).num_waiting_bytes()); }, nullptr, nullptr, nullptr},
    {"is_connected", [](PyObject *self, void *) { return PyBool_FromLong(of(self).is_connected()); }, nullptr, nullptr, nullptr},
    {}};

PyType_Slot slots[] = {{Py_tp_doc, const_cast<char *>("One side: the native form of `Gateway`.")},
                       {Py_tp_new, reinterpret_cast<void *>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void *>(destroy)},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, attributes},
                       {0, nullptr}};
PyType_Spec spec = {"isthmus.wan.roce.gateway._native.NativeGateway", sizeof(Instance), 0, Py_TPFLAGS_DEFAULT, slots};

PyObject *crc_of(PyObject *, PyObject *data) {
    if (!PyBytes_Check(data)) return PyErr_Format(PyExc_TypeError, "crc32 takes bytes");
    return PyLong_FromUnsignedLong(crc32(data_of(data), size_t(PyBytes_GET_SIZE(data))));
}

PyMethodDef functions[] = {{"crc32", crc_of, METH_O, "As `zlib.crc32`."}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "The gateway's state machine in C++.", -1, functions,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace isthmus

PyMODINIT_FUNC PyInit__native() {
    PyObject *made = PyModule_Create(&isthmus::module);
    PyObject *type = made == nullptr ? nullptr : PyType_FromSpec(&isthmus::spec);
    if (type == nullptr || PyModule_AddObjectRef(made, "NativeGateway", type) < 0 ||
        PyModule_AddStringConstant(made, "SOURCES", SOURCES) < 0) {
        Py_XDECREF(made);
        made = nullptr;
    }
    Py_XDECREF(type);
    return made;
}
