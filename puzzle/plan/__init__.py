# SPDX-License-Identifier: Apache-2.0
"""What a run would need: counted from shapes, a device table and the config alone."""
