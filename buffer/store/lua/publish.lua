-- Sets the latest policy version. args: version, evaluate (request its evaluation). Repeating a version has no effect.
-- The number of held-out tasks is known to the servers: evaluate.lua creates the slices at the first request.
local version = args.version
local last, before, depth = unpack(redis.call('HMGET', key('meta'), 'version', 'evaluated', 'resumed_depth'))
if not last or version > tonumber(last) then
  redis.call('HSET', key('meta'), 'version', version, 'consumed', 0)
  depth = tonumber(depth or depth_of(version))
  if depth ~= depth_of(version) then  -- the first one after a restart
    branches[#branches + 1] = {first = version, depth = depth}
    set_branches()
  end
end
redis.call('HDEL', key('meta'), 'resumed_depth')
if args.evaluate and (not before or version > tonumber(before)) then
  if before then
    -- Servers get no more of it: tasks without an answer count as failed.
    local eval = key('eval:' .. before)
    if redis.call('HEXISTS', eval, 'finished') == 0 then
      redis.call('HSETNX', eval, 'tasks', 0)
      redis.call('HSETNX', eval, 'started', now())
      local figures = redis.call('HMGET', eval, 'tasks', 'done', 'failed')
      local left = tonumber(figures[1]) - tonumber(figures[2] or 0) - tonumber(figures[3] or 0)
      count_eval_tasks(before, 0, {unfinished = left})
    end
    for _, id in ipairs(redis.call('SMEMBERS', key('eval:' .. before .. ':groups'))) do
      redis.call('DEL', key('group:' .. id))
    end
    for _, name in ipairs({'eval_todo:', 'eval_issued:', 'eval_holder:', 'eval_since:', 'eval_handed:',
      'eval_failures:'}) do
      redis.call('DEL', key(name .. before))
    end
    redis.call('DEL', key('eval:' .. before .. ':groups'))
  end
  redis.call('HSET', key('meta'), 'evaluated', version)
end
