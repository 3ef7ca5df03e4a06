-- The request as one table: read once, changed by put(), written once by save().
local TEXTS = { "state", "handler", "unit" }
local NUMBERS = {
  "paused", "level", "limit", "retries", "poison", "max_failures", "max_percent",
  "total", "bytes", "delivered", "done", "failed", "records_done", "records_failed",
  "out", "due_ms", "hold_ms", "rate_ms", "rate_at_ms", "started_ms", "finished_ms",
}

local function load_request(meta)
  local texts = redis.call("HMGET", meta, unpack(TEXTS))
  if not texts[1] then
    return nil
  end
  local r = { changes = {} }
  for i, field in ipairs(TEXTS) do
    r[field] = texts[i] or ""
  end
  for i, value in ipairs(redis.call("HMGET", meta, unpack(NUMBERS))) do
    r[NUMBERS[i]] = tonumber(value) or 0
  end
  return r
end

local function put(r, field, value)
  r[field] = value
  r.changes[field] = value
end

local function save(meta, r)
  local flat = {}
  for field, value in pairs(r.changes) do
    flat[#flat + 1] = field
    flat[#flat + 1] = value
  end
  if #flat > 0 then
    redis.call("HSET", meta, unpack(flat))
    r.changes = {}
  end
end

local function is_live(r)
  return r.state == "loading" or r.state == "open"
end

local function unknown()
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end
