-- The curve of a request: points of 24 bytes each, so that whoever looks later sees how it went.
local POINT, MOST_POINTS, STRETCHES = 24, 240, 120
-- A curve that gets no point for so long goes; an open request gets one at least each STRETCHth of
-- its age while it moves. An ended request has its curve for as long as it is kept, and this long.
local UNTOUCHED_MS = 30 * 86400000
local POINT_FORMAT = ">I6I5I5I5I3"

-- Adds a point, if something has changed since the last one. The more time the curve spans, the
-- farther its points are apart: when there are 240 of them, every second one is dropped. A request
-- that has ended gets its last point, but no curve of its own any more.
local function note_pace(k, r, now)
  local size = redis.call("STRLEN", k.pace)
  if size == 0 and (not is_live(r) or r.delivered == 0) then
    return
  end
  load_more(k.meta, r)
  local total = tonumber(redis.call("HGET", k.meta, "records")) or 0
  local counts = { r.records_done, r.records_failed, total, redis.call("ZCARD", k.leases) }
  for i, most in ipairs({ 2 ^ 40, 2 ^ 40, 2 ^ 40, 2 ^ 24 }) do
    counts[i] = math.max(0, math.min(counts[i], most - 1))
  end
  local point = struct.pack(POINT_FORMAT, now, unpack(counts))
  if size >= POINT then
    local last = redis.call("GETRANGE", k.pace, size - POINT, size - 1)
    local first = redis.call("GETRANGE", k.pace, 0, POINT - 1)
    if #last < POINT or string.sub(last, 7) == string.sub(point, 7) then
      return
    end
    local from, till = struct.unpack(">I6", first), struct.unpack(">I6", last)
    if is_live(r) and now - till < (till - from) / STRETCHES then
      return
    end
  end
  if size + POINT > POINT * MOST_POINTS then
    local all, kept = redis.call("GETRANGE", k.pace, 0, -1), {}
    for at = 1, #all - POINT + 1, 2 * POINT do
      kept[#kept + 1] = string.sub(all, at, at + POINT - 1)
    end
    redis.call("SET", k.pace, table.concat(kept) .. point)
  else
    redis.call("APPEND", k.pace, point)
  end
  -- A purge by an earlier version does not know this key.
  redis.call("PEXPIRE", k.pace, UNTOUCHED_MS + r.keep_ms)
end
