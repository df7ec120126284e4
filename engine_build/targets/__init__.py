"""What a plan is built for. Each target's library is imported when that target is used, never before."""

TARGET_NAMES = ("openvino", "reference", "tensorrt", "tensorrt-rtx")
