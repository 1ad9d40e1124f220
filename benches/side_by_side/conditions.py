"""Clocks, power and reasons for throttling, from the driver's management library (NVML)."""

import ctypes
import statistics

REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
SM, MEMORY = 1, 2


class Conditions:
    """The state of one GPU. Without the library, or on the CPU, there is nothing to say."""

    def __init__(self, uuid=None):
        self.handle = None
        self.readings = []
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        handle = ctypes.c_void_p()
        # By its UUID where that is known: the library knows nothing of CUDA_VISIBLE_DEVICES.
        by_uuid = lambda: self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        by_index = lambda: self.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(handle))
        if self.call("nvmlInit_v2") and (by_uuid() if uuid else by_index()):
            self.handle = handle

    def call(self, name, *args):
        function = getattr(self.nvml, name, None)
        return function is not None and function(*args) == 0

    def number(self, name, *args, kind=ctypes.c_uint):
        value = kind()
        return value.value if self.call(name, self.handle, *args, ctypes.byref(value)) else None

    def driver(self):
        """The driver's version."""
        text = ctypes.create_string_buffer(80)
        if self.handle is not None and self.call("nvmlSystemGetDriverVersion", text, len(text)):
            return text.value.decode()
        return None

    def read(self):
        """Takes a reading; called while the GPU works."""
        if self.handle is None:
            return
        milliwatts = self.number("nvmlDeviceGetPowerUsage")
        self.readings.append(
            {
                "sm_clock_mhz": self.number("nvmlDeviceGetClockInfo", SM),
                "memory_clock_mhz": self.number("nvmlDeviceGetClockInfo", MEMORY),
                "power_w": None if milliwatts is None else milliwatts / 1e3,
                "temperature_c": self.number("nvmlDeviceGetTemperature", 0),
                "throttle": self.number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0,
            }
        )

    def take(self):
        """The readings since the last call, as a report has them: means, and every reason that was met."""
        readings, self.readings = self.readings, []
        if not readings:
            return None
        found = {}
        for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"):
            values = [r[name] for r in readings if r[name] is not None]
            if values:
                found[name] = statistics.fmean(values)
        bits = 0
        for r in readings:
            bits |= r["throttle"]
        return found | {"throttle": [name for bit, name in REASONS.items() if bits & bit]}
