-- (task) -> issued, for as many tickets as the server's credits and the staleness capacity allow.
-- ARGV: server, its policy version, its credits, max_staleness, groups per version, ticket deadline in s, train tasks.
-- Returns a flat list: id, epoch, position, ...
--
-- Admission (AReaL, arXiv 2505.24298, section 5.1, relative to the last publication): a group issued now is consumed after
-- the `pipeline` groups before it, so at version + floor((consumed + pipeline) / per_version), where `consumed` counts
-- the groups trained since `version` was published. It is issued only if that is at most max_staleness versions
-- ahead of the version that will generate it.
local server, server_version, credits = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_staleness, per_version, deadline_s, tasks = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local meta = redis.call('HMGET', key('meta'), 'version', 'consumed', 'finished', 'epoch', 'position')
if meta[3] then return {} end
local version, consumed = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
-- A server that claims a version which nobody published must not widen the capacity.
server_version = math.min(server_version, version)
local epoch, position = tonumber(meta[4] or 0), tonumber(meta[5] or 0)
local pipeline = redis.call('ZCARD', key('issued')) + redis.call('ZCARD', key('ready')) + redis.call('ZCARD', key('leased'))
local capacity = (max_staleness + 1 + server_version - version) * per_version - consumed - pipeline
local free = credits - tonumber(redis.call('HGET', key('in_flight'), server) or 0)
local wanted = math.min(capacity, free)
if wanted <= 0 then return {} end

local granted = {}
local deadline = now() + deadline_s
for _ = 1, wanted do
  local task_epoch, task_position
  local again = redis.call('LPOP', key('reissue'))
  if again then
    task_epoch, task_position = again:match('(%d+):(%d+)')
  else
    if position >= tasks then epoch, position = epoch + 1, 0 end
    task_epoch, task_position = epoch, position
    position = position + 1
  end
  local id = string.format('%d', redis.call('HINCRBY', key('meta'), 'next_id', 1))
  redis.call('ZADD', key('issued'), deadline, id)
  redis.call('HSET', key('ticket:' .. id), 'server', server, 'epoch', task_epoch, 'position', task_position)
  granted[#granted + 1] = id
  granted[#granted + 1] = tonumber(task_epoch)
  granted[#granted + 1] = tonumber(task_position)
end
redis.call('HSET', key('meta'), 'epoch', epoch, 'position', position)
redis.call('HINCRBY', key('in_flight'), server, wanted)
count('issued', wanted)
return granted
