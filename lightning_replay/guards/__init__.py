# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Pure checks. Each returns a finding or None; none logs, raises or decides."""
